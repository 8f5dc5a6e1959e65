"""See tensorpack/__init__.py."""
