"""Runs any number of jobs with a bounded number of them in the queue."""
