"""What is decided before anyone pays: pure functions from values to values."""
