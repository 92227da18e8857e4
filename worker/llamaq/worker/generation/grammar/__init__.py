"""Constrains the output of a job to a grammar or a JSON schema."""
