"""What runs the graph: the master session and what watches it."""
