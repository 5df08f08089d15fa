"""Model shapes: known models, Hugging Face configurations, measured models. Pure."""
