"""Decides which job gets a slot, and which tokens each tick computes."""
