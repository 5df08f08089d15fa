"""Methods of searching: which setting next, and how far to train it."""
