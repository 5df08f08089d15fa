"""Runs: store, typed events, states, and the fold of events into a view."""
