"""Computes batches with llama.cpp, and copies, saves and loads the KV state of sequences."""
