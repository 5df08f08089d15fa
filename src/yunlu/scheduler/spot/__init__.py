"""Spot nodes under a deadline: models, policies and replays. Pure but for the readers of traces."""
