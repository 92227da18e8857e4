"""vLLM's fields `prompt_token_ids` and `token_ids`, for requests with `return_token_ids`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamaq.producer.openai_format.endpoints import Endpoint


def write_token_ids(
    endpoint: Endpoint, answer: dict[str, Any], prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> None:
    """Add the fields to a whole answer. The answer to a chat has its prompt once, as in vLLM.

    Args:
        endpoint: The endpoint of the request.
        answer: The object of the answer.
        prompts: For each choice, the tokens of its prompt.
        outputs: For each choice, its generated tokens.
    """
    for index, (choice, prompt, output) in enumerate(zip(answer["choices"], prompts, outputs, strict=True)):
        if index == 0 or endpoint is Endpoint.COMPLETIONS:
            _write_prompt(endpoint, answer, index, prompt)
        choice["token_ids"] = list(output)


class TokenIdFields:
    """The fields of the chunks of one streamed choice.

    Tokens whose text is withheld are in the next chunk, at the latest in the last one.

    Args:
        endpoint: The endpoint of the request.
        prompt: The tokens of the prompt.
    """

    def __init__(self, endpoint: Endpoint, prompt: Sequence[int]) -> None:
        self._endpoint = endpoint
        self._prompt: Sequence[int] | None = prompt
        """None: a chunk has it."""
        self._new: list[int] = []
        """Tokens that no chunk has."""

    def write(self, chunks: Sequence[dict[str, Any]], tokens: Sequence[int]) -> None:
        """Add the fields to the next chunks of the choice, which may be none. `tokens` are its next tokens."""
        self._new += tokens
        if not chunks:
            return
        if self._prompt is not None:
            _write_prompt(self._endpoint, chunks[0], 0, self._prompt)
            self._prompt = None
        chunks[-1]["choices"][0]["token_ids"] = self._new
        self._new = []


def _write_prompt(endpoint: Endpoint, answer: dict[str, Any], index: int, prompt: Sequence[int]) -> None:
    place = answer if endpoint is Endpoint.CHAT else answer["choices"][index]
    place["prompt_token_ids"] = list(prompt)
