"""Wires the parts of a worker together and manages its threads and processes."""
