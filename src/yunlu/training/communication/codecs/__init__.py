"""Codecs: compress a flat tensor."""
