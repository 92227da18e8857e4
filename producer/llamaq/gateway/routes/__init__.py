"""The endpoints. Each reads a request, submits its jobs to a queue, and writes the answer."""
