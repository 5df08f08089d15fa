"""The parts of ``benchmarks/trainers.py``."""
