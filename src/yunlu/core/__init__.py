"""Foundations of every room: values, errors, settings, units, atomic files."""
