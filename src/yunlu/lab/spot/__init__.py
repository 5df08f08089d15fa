"""Spot machines in hindsight: traces, replays, baselines and the optimum."""
