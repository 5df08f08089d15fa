"""Training in which workers wait for nobody: servers hold the weights, workers come and go."""
