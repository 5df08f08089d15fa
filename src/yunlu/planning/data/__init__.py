"""Numbers that come with the planner: fitted constants, shapes of known models."""
