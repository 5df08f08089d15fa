"""Contract tests of every door, for others to inherit."""
