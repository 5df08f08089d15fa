"""Replays recorded workloads against measured profiles, with the policies that run live."""
