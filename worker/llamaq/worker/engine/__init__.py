"""The gate to llama.cpp: runs batches and moves KV state."""
