"""Less memory: activations computed again, gradients freed at once, and what to do when it runs out."""
