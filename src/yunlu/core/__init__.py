"""What every room stands on: values, errors, settings, files, states."""
