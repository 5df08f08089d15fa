"""Tuning methods replayed on recorded learning curves."""
