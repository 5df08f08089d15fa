"""How workers exchange gradients and weights: over which paths, how packed, and how often."""
