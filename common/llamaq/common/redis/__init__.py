"""Connects to a single Redis, Sentinel or Cluster, and classifies their errors."""
