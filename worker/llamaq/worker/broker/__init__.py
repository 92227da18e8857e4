"""The Redis side of a worker: claims jobs, writes their events, and reports the state of the worker."""
