"""Memory and time of a training step, predicted for many layouts at once, with an error bar. Pure."""
