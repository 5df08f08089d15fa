"""Search: from offers and layouts that fit to a few ranked options, with reasons. Pure."""
