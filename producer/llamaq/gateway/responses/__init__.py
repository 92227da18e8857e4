"""OpenAI's Responses API: stored answers, which a client can leave, find again and continue."""
