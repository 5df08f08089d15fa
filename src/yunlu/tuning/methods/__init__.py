"""Search methods: which setting next, and how far to train it."""
