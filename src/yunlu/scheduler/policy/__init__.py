"""Allocation policies: which job gets which devices. Pure functions of the pool's state.

The live pool and the simulator that replays recorded workloads call the same policies.
"""
