"""Replays recorded workloads on measured profiles, with the policies of the live pool."""
