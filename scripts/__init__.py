"""Thin commands over the library; run them as files: python scripts/train.py."""
