"""Runs a study: trials start, are judged, share devices, continue and end."""
