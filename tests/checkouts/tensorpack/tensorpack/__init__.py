"""As much of tensorpack as the benchmark has to do with."""
