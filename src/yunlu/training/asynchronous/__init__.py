"""Asynchronous training: servers hold the weights, workers come and go and do not wait for each other."""
