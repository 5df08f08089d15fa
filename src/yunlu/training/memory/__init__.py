"""Saving memory: recomputation, gradient release, and recovery from out-of-memory errors."""
