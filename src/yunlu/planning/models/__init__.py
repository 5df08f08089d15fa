"""Models as shapes: what is known, described by a configuration, or was measured. Pure."""
