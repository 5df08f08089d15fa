"""Where runs get their devices: this machine, Slurm, Ray; one door, ``executor.Executor``."""
