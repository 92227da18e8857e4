"""Computes embeddings of texts and scores of documents: each batch has texts of several jobs."""
