"""Executors start workers on this machine, Slurm or Ray, behind one protocol, ``executor.Executor``."""
