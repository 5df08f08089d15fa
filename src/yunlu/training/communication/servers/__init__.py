"""Weights that live in servers: workers pull them, and push gradients whenever they have one."""
