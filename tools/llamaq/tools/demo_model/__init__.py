"""The demo model: a seeded grammar of text, a tokenizer, a small llama, its training, its export and its evaluation.

Development only; nothing here is in the wheel. README.md beside this file says how to reproduce the shipped file.
"""
