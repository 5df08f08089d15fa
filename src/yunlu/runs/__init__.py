"""What happened in a run: its store, typed events, states, and the fold of its log."""
