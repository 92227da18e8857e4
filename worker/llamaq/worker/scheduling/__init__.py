"""Decides which job computes what in each tick."""
