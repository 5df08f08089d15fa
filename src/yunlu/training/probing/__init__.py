"""Benchmarks of this machine: operators, memory, links and disk."""
