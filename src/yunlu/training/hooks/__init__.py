"""Callbacks: code of the user's own, called by a run while it trains."""
