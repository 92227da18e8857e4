"""The endpoints. Each reads a request, lets the queues do the work, and writes the answer."""
