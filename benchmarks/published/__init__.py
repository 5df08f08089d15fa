"""What others published, reproduced from their data: ``make bench-published``."""
