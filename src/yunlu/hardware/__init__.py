"""What hardware there is or could be had: values only."""
