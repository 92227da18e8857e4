"""Reads the state of jobs, workers and dead letters from Redis."""
