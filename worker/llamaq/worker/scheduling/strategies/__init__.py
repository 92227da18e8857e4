"""Decides how the running jobs share the batch of a tick."""
