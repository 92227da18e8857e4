"""The nouns that everyone in the worker shares: job, slot, batch, and the operations that an engine offers."""
