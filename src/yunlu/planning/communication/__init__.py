"""Which way to exchange gradients or weights: predicted from measured links, chosen with reasons. Pure."""
