"""Runs Redis and workers together on one machine."""
