"""The parts of ``benchmarks/parallel.py``."""
