"""Who gets which devices: pure functions of what is there and what is asked.

The pool that runs and the simulator that replays recorded workloads call the same policies.
"""
