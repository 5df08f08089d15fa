"""Parameter servers: they hold the weights; workers pull them and push gradients."""
