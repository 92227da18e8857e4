"""Turns one job's request into tokens, logits into the next token, and tokens into text."""
