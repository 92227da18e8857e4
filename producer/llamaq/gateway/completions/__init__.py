"""The answers of chat completions and completions: OpenAI's objects, and the fields that vLLM adds."""
