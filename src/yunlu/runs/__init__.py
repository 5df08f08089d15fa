"""What happened in a run: its directory, typed events, states, and the index of runs."""
