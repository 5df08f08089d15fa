"""Topologies of a run: one worker, launched workers, an elastic group."""
