"""Model and data parallelism: one model over many workers."""
