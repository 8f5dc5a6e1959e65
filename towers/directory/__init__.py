"""The run directory: who writes it, and what it was trained under."""
