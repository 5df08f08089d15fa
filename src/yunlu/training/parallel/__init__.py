"""One model over many workers: who holds what, and how their results become one."""
