"""The parts of ``benchmarks/comm.py``."""
