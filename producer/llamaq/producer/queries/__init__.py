"""Reads the state of jobs, queues, workers and dead letters from Redis, and sends slot commands to workers."""
