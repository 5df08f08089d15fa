"""Scheduler of the pool: queue, observe, decide, apply, reclaim."""
