"""Communication planning: predict and choose how workers exchange gradients or weights. Pure."""
