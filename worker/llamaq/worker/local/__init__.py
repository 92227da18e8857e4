"""Runs an embedded Redis and workers together on one machine."""
