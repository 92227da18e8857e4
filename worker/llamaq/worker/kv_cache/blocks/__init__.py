"""Decides which blocks of saved KV state are stored in host memory and which on disk."""
