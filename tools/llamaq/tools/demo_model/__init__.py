"""The demo model: a seeded text grammar, a tokenizer, a small llama model, and its training, export and evaluation.

This package is for development and is not in the wheel. Its README.md explains how to reproduce the shipped file.
"""
