"""Methods of tuning replayed on recorded learning curves."""
