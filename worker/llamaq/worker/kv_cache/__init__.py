"""Decides which job or cached prefix holds which KV cells, and what a prompt can reuse."""
