"""How many machines to have, and of which offer. Pure: values in, values out."""
