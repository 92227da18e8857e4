"""Turns text and chat messages into tokens, and tokens into text."""
