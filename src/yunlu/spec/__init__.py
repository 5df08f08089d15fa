"""Job specification: what the user asks, and how it is read."""
