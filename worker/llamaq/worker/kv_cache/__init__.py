"""Decides which job or cached prefix holds which KV cells, and which cells a prompt can reuse."""
