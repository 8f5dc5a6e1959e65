"""What makes the graph: devices, towers, sums, updates."""
