"""What feeds the graph: batches, passes, positions."""
