"""Decides which tokens a tick computes ahead of the sampled ones: those that a grammar forces, and drafts."""
