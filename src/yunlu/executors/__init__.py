"""Executors start workers: on this machine, Slurm or Ray, behind one door, ``executor.Executor``."""
