"""Parts of ``benchmarks/planner.py``: evidence, frozen protocols, fits and scores."""
