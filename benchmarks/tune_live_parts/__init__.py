"""The parts of ``benchmarks/tune_live.py``."""
