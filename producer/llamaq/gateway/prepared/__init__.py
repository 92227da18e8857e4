"""Turns requests into jobs, and the results of these jobs into answers, for endpoints and for lines of a batch."""
