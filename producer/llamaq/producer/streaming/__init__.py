"""Delivers the events of jobs to their readers."""
