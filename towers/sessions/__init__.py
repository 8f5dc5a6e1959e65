"""Which sessions work where: their entries in a run directory and on this machine, and whether another one fits beside them."""
