"""Where metrics go besides the run: the ``Tracker`` door."""
