"""Delivers the events of jobs from Redis to their readers."""
