"""Reads the state of jobs, queues, workers and dead letters from Redis, purges jobs, and sends slot commands."""
