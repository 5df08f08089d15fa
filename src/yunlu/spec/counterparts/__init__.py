"""What other tools call the keys of a job, and how their values convert."""
