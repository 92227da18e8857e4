"""Turns texts in a request into tokens, if a job accepts only tokens there. A worker of the queue tokenizes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.text_commands import TextAction
from llamaq.producer import AsyncClient
from llamaq.producer.openai_format.chat_messages import TEMPLATE_FIELDS
from llamaq.producer.queries import text_commands

MAX_TEXTS = 256
"""Largest number of texts in one request. Each is a message to a worker."""


async def with_tokens(client: AsyncClient, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body in which `prompt` and `logit_bias` have the forms that a job takes.

    llama-server also takes prompts that mix texts and tokens, prompts as objects with a `prompt_string`, and texts in
    place of tokens in `logit_bias`.

    Raises:
        InvalidRequest: A prompt has images, or the request has too many texts.
        LlamaqError: No worker of the queue has answered.
    """
    tokenizer = _Tokenizer(client)
    changed: dict[str, Any] = {}
    if "prompt" in fields:
        changed["prompt"] = await _plain_prompt(tokenizer, fields["prompt"])
    if fields.get("logit_bias"):
        changed["logit_bias"] = await _plain_biases(tokenizer, fields["logit_bias"])
    return {**fields, **changed}


async def prompt_tokens_of(client: AsyncClient, job: Mapping[str, Any]) -> list[int]:
    """Return the tokens of the prompt of a job.

    Args:
        client: The client of the queue.
        job: The arguments of `submit`.

    Raises:
        LlamaqError: No worker of the queue has answered.
    """
    if "tokens" in job:
        return list(job["tokens"])
    chat = {name: job[name] for name in ("messages", *TEMPLATE_FIELDS) if name in job}
    prompt = chat if "messages" in job else {"text": job["prompt"]}
    reply = await text_commands.ask(client.connection, TextAction.TOKENIZE, None, **prompt)
    return list(reply.tokens)


class _Tokenizer:
    """Asks a worker for tokens, at most `MAX_TEXTS` times."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._n_asked = 0

    async def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        self._n_asked += 1
        if self._n_asked > MAX_TEXTS:
            raise InvalidRequest(f"prompt, logit_bias: at most {MAX_TEXTS} texts can be turned into tokens")
        reply = await text_commands.ask(
            self._client.connection, TextAction.TOKENIZE, None, text=text, add_special=add_special
        )
        return list(reply.tokens)


async def _plain_prompt(tokenizer: _Tokenizer, prompt: Any) -> Any:
    """Return a prompt, or a list of prompts, as texts and lists of tokens. Other values stay and are refused later."""
    if isinstance(prompt, Mapping):
        return _text_of(prompt)
    if not isinstance(prompt, list):
        return prompt
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return prompt
    if int in kinds:
        return await _mixed_prompt(tokenizer, prompt)
    return [await _plain_prompt(tokenizer, part) for part in prompt]


def _text_of(prompt: Mapping[str, Any]) -> str:
    if prompt.get("multimodal_data"):
        raise InvalidRequest("prompt.multimodal_data: llamaq does not support it; leave it out")
    text = prompt.get("prompt_string")
    if not isinstance(text, str):
        raise InvalidRequest("prompt.prompt_string: a text is required")
    return text


async def _mixed_prompt(tokenizer: _Tokenizer, prompt: list[Any]) -> list[Any]:
    """Return the tokens of a prompt that has texts between its tokens. Only a text at its beginning gets a BOS."""
    tokens: list[Any] = []
    for number, part in enumerate(prompt):
        tokens += await tokenizer.tokens_of(part, add_special=number == 0) if isinstance(part, str) else [part]
    return tokens


async def _plain_biases(tokenizer: _Tokenizer, biases: Any) -> Any:
    """Return `logit_bias` as pairs of a token and a bias. The bias of a text applies to each of its tokens."""
    pairs = list(biases.items()) if isinstance(biases, Mapping) else biases
    if not isinstance(pairs, list):
        return biases
    plain: list[list[Any]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return biases
        token, bias = pair
        if isinstance(token, str) and not token.isdecimal():
            plain += [[each, bias] for each in await tokenizer.tokens_of(token, add_special=False)]
        else:
            plain.append([token, bias])
    return plain
