"""Planning: layouts, predictions and options, as pure functions from values to values."""
