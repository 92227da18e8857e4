"""Rewrites JSON schemas into the keywords that a grammar can hold, and refuses those that no grammar holds."""
