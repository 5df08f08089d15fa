"""Carrying a study out: trials start, are judged, share devices, go on, and end."""
