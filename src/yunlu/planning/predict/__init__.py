"""Prediction of memory and step time for many layouts at once, with intervals. Pure."""
