"""Studies: which settings to try, how far to train each, and on how many devices."""
