"""Memory and time of a training step, foretold for many layouts at once, with an error bar. Pure."""
