"""What the terminal shows: values in, tables and lines out."""
