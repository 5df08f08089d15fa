"""Texts in English and in Chinese."""
