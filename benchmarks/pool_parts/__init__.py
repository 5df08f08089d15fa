"""Parts of ``benchmarks/pool_live.py``."""
