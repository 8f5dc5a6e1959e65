"""Towers."""
