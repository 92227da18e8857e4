"""Saves and restores a slot's state under a name."""
