"""Anthropic's messages API: reads its requests, and writes its answers and events."""
