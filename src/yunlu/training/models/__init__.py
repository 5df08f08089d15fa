"""Built-in models, and loading of others."""
