"""Research that the product never loads: simulator, baselines, replays, fits."""
