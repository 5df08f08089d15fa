"""From hardware that could be had and layouts that fit to a few options, with reasons. Pure."""
