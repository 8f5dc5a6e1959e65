"""What benchmark.py measures: workloads, the sides that train them, each in a process of its own, and the tables."""
