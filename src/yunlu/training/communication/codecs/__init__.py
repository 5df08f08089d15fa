"""Compressors: fewer bytes for a flat tensor of numbers."""
