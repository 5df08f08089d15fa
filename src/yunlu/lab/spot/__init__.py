"""Spot nodes in hindsight: traces, replays, baselines and the optimum."""
