"""Jobs: lifecycle, index of runs, plan options, calibration, report model."""
