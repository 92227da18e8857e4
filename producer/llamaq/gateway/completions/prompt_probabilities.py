"""The probabilities of a prompt's tokens in answers: in vLLM's field `prompt_logprobs`, and in an echoed prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from struct import Struct
from typing import Any, TypeVar

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import Result, TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs, ScoredToken
from llamaq.gateway.completions.logprobs import Pieces, logprobs_object
from llamaq.gateway.http.answer_writer import write_if_large_off_the_loop
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.token_bytes_cache import starts_of
from llamaq.producer import AsyncClient
from llamaq.producer.openai_format.endpoints import Endpoint

MAX_VALUES_OF_ANSWER = 1_000_000
"""Largest number of probabilities of prompts in one answer that is no stream. Each has up to 80 bytes of JSON, and up
to 400 bytes of memory until then."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptFields:
    """What an answer has about the probabilities of one prompt."""

    logprobs: dict[str, Any] | None = None
    """The object `logprobs` of the echoed prompt. None: no prompt is echoed with probabilities."""
    listed: dict[str, Any] = field(default_factory=dict)
    """The field `prompt_logprobs`, if the request has it. Its entries are an iterator, made when JSON is written."""


class PromptValueCount:
    """Counts the probabilities of prompts in one answer, and bounds them: each of its choices may have many."""

    def __init__(self) -> None:
        self._n_values = 0

    def add(self, result: Result) -> None:
        """Count those of a choice.

        Raises:
            InvalidRequest: With them, the answer has too many.
        """
        if result.prompt_logprobs is not None:
            self._n_values += len(result.prompt_logprobs) * (1 + result.prompt_logprobs.n_top)
        if self._n_values > MAX_VALUES_OF_ANSWER:
            raise InvalidRequest(
                f"prompt_logprobs: this answer would have more than {MAX_VALUES_OF_ANSWER} probabilities of prompt "
                "tokens; ask for a stream, or for fewer alternatives, choices or prompts at once"
            )


@dataclass(frozen=True, slots=True)
class PromptProbabilities:
    """Writes the probabilities of prompts as the answers to one request have them.

    Args:
        models: What is known about the models.
        client: The client of the queue.
    """

    models: ModelKnowledge
    client: AsyncClient

    async def listed(self, prompt: PromptLogprobs) -> Iterator[dict[str, Any] | None]:
        """Return vLLM's field `prompt_logprobs`: for each token but the first, a map from token ids to probabilities.

        All maps at once would take a hundred times the memory of the packed numbers, so each is made when it is written
        as JSON.

        Raises:
            LlamaqError: No worker of the queue has answered.
        """
        pieces = await self._pieces(prompt)
        return (_by_id(entry, pieces) for entry in prompt)

    async def echoed(self, prompt: PromptLogprobs, text: str, n_top: int) -> dict[str, Any]:
        """Return the object `logprobs` of an echoed prompt, in the form of a completion.

        If the answer ended at once, the end token is part of it: clients such as lm-eval remove the last entry, which
        they expect to be that of a generated token.

        Args:
            prompt: The probabilities.
            text: The text of the prompt in the answer.
            n_top: Largest number of alternatives at each position.

        Raises:
            LlamaqError: No worker of the queue has answered.
        """
        pieces = await self._pieces(prompt)
        return await write_off_the_loop([prompt], lambda: _echoed_object(prompt, text, n_top, pieces))

    async def _pieces(self, prompt: PromptLogprobs) -> Pieces:
        return await self.models.token_bytes(
            self.client, await write_off_the_loop([prompt], lambda: all_tokens(prompt))
        )


def all_tokens(prompt: PromptLogprobs) -> set[int]:
    """Return the tokens of a prompt, all their alternatives, and those of `end`."""
    n_top, end = prompt.n_top, prompt.end
    alternatives = Struct(f"<8x{n_top}i{4 * n_top}x").iter_unpack(prompt.rows)
    found = {*prompt.tokens, *chain.from_iterable(alternatives)}
    return found if end is None else found | {end.token, *(token for token, _ in end.top)}


def joined(first: dict[str, Any], second: dict[str, Any] | None) -> dict[str, Any]:
    """Return the object `logprobs` of a completion for a text and the text after it."""
    return first if second is None else {name: first[name] + second[name] for name in first}


async def write_off_the_loop(prompts: Iterable[PromptLogprobs | None], write: Callable[[], T]) -> T:
    """Return what `write` returns. It is called on a thread if it takes long, because it reads these probabilities."""
    n_bytes = sum(len(prompt.rows) for prompt in prompts if prompt is not None)
    return await write_if_large_off_the_loop(n_bytes, write)


def _by_id(entry: ScoredToken | None, pieces: Pieces) -> dict[str, Any] | None:
    """Return a map from token ids to probabilities, for a token and its alternatives."""
    if entry is None:
        return None
    found = {str(entry.token): _probability(entry.logprob, entry.rank, pieces[entry.token])}
    for rank, (token, logprob) in enumerate(entry.top, 1):
        found.setdefault(str(token), _probability(logprob, rank, pieces[token]))
    return found


def _probability(logprob: float, rank: int | None, piece: bytes) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": piece.decode(errors="replace")}


def _echoed_object(prompt: PromptLogprobs, text: str, n_top: int, pieces: Pieces) -> dict[str, Any]:
    scored = [*prompt[1:], *((prompt.end,) if prompt.end else ())]
    entries = [entry for entry in scored if entry is not None]
    tokens = (prompt.tokens[0], *(entry.token for entry in entries))
    logprobs = [TokenLogprobs(0.0, ()), *(TokenLogprobs(entry.logprob, entry.top[:n_top]) for entry in entries)]
    found = logprobs_object(Endpoint.COMPLETIONS, tokens, logprobs, pieces)
    found["token_logprobs"][0] = found["top_logprobs"][0] = None  # nothing comes before the first token
    return found | {"text_offset": list(_offsets(tokens, len(prompt), text, pieces))}


def _offsets(tokens: Sequence[int], n_prompt: int, text: str, pieces: Pieces) -> Iterator[int]:
    """Yield where the text of each token begins in the echoed text. It may lack control tokens, such as BOS."""
    n_all = len(b"".join(pieces[token] for token in tokens[:n_prompt]).decode(errors="replace"))
    for start in starts_of(tokens, pieces):
        yield max(0, start - n_all + len(text))
