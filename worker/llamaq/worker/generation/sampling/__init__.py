"""Draws the next token of a job from its logits: the samplers of llama.cpp, in the order that the job asks for."""
