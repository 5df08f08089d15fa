"""Autotuning before the first step: settings timed on the model itself, cached between runs."""
