"""The kinds of learning, behind the ``Task`` door."""
