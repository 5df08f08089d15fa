"""The engine; with serving and privacy the only room that knows torch."""
