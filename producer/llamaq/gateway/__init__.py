"""The HTTP server `llamaq serve`: it speaks the APIs of OpenAI, Anthropic and llama-server in front of queues."""
