"""Hardware that is there or can be rented: devices, offers, prices, nodes."""
