"""OpenAI's Files API: files in Redis, which every server can read, in compressed blocks and with an expiry."""
