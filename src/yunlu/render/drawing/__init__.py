"""The drawing kit: figure values to SVG and to matplotlib."""
