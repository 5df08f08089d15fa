"""Autoscaling: how many nodes of which offer to have. Pure."""
