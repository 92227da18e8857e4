"""Rewrites JSON schemas into keywords that a grammar can enforce, and refuses keywords that no grammar can enforce."""
