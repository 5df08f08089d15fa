"""The parts of ``benchmarks/tune.py``."""
