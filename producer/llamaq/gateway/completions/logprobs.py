"""Builds the objects `logprobs` of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.gateway.token_bytes_cache import TokenStarts
from llamaq.producer.openai_format.endpoints import Endpoint

LOWEST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot have. OpenAI's API has the same number."""

Pieces = Mapping[int, bytes]
"""Maps token ids to their bytes."""


def tokens_of(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> set[int]:
    """Return all tokens whose bytes an object `logprobs` has."""
    return {*tokens, *(token for each in logprobs for token, _ in each.top)}


def logprobs_object(
    endpoint: Endpoint,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    pieces: Pieces,
    starts: TokenStarts | None = None,
) -> dict[str, Any]:
    """Return the object `logprobs` for some tokens of an answer.

    Args:
        endpoint: The endpoint of the request, which determines the form of the object.
        tokens: The generated tokens.
        logprobs: Their probabilities.
        pieces: The bytes of the tokens that `tokens_of` returns.
        starts: Finds where these tokens begin in the text, after those before them. None: they are the first.
    """
    if endpoint is Endpoint.CHAT:
        return {"content": [token_object(token, each, pieces) for token, each in zip(tokens, logprobs, strict=True)]}
    starts = starts or TokenStarts()
    return {
        "tokens": [_text(token, pieces) for token in tokens],
        "token_logprobs": [_number(each.logprob) for each in logprobs],
        "top_logprobs": [_best_of_each_text(each, pieces) for each in logprobs],
        "text_offset": [starts.next_start(pieces[token]) for token in tokens],
    }


def token_object(token: int, logprobs: TokenLogprobs, pieces: Pieces) -> dict[str, Any]:
    """Return the entry of a generated token with its alternatives."""
    top = [_alternative(each, value, pieces) for each, value in logprobs.top]
    return _alternative(token, logprobs.logprob, pieces) | {"top_logprobs": top}


def _best_of_each_text(logprobs: TokenLogprobs, pieces: Pieces) -> dict[str, float]:
    """Return the alternatives by their texts: of those with one text, such as parts of a character, the best."""
    best: dict[str, float] = {}
    for token, value in logprobs.top:  # the best comes first
        best.setdefault(_text(token, pieces), _number(value))
    return best


def _alternative(token: int, logprob: float, pieces: Pieces) -> dict[str, Any]:
    return {"id": token, "token": _text(token, pieces), "bytes": list(pieces[token]), "logprob": _number(logprob)}


def _text(token: int, pieces: Pieces) -> str:
    return pieces[token].decode(errors="replace")


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)
