"""The parts of ``benchmarks/text_task.py``: the data, and each side as its user writes it."""
