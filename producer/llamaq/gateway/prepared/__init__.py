"""Requests as jobs, and the results of these jobs as answers: the same for an endpoint and for a line of a batch."""
