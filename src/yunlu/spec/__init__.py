"""What the user asks: the job and how it is read."""
