"""Complete or absent: what a run needs to go on."""
