"""One facade for everything: the client protocol, the client of this machine, the public calls."""
