"""The shared nouns of the worker: job, slot, batch, and the operations on sequences that an engine offers."""
