"""OpenAI's Files API: files in Redis, where every server sees them, in compressed blocks and with an expiry."""
