"""Builds the blocks of an answer from its parts, and the events of these blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic_core import from_json

from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.gateway.http.json_body import is_finite
from llamaq.producer import Chunk
from llamaq.producer.answer_parts.answer_format import AnswerForm
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.openai_format.tools import call_id

Event = dict[str, Any]
Kind = Literal["text", "thinking", "tool_use"]

STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.DEADLINE: "max_tokens",
    FinishReason.CANCELLED: "end_turn",
}
EMPTY: dict[Kind, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""The content of a block that begins. No signature protects reasoning: the client may change it."""


class AnswerBlocks:
    """The answer to one request: thinking, text and uses of tools, in the order of the answer.

    Args:
        job_id: The job of the answer.
        form: The form of the answer.
        model: The name of the model that the answer shows.
    """

    def __init__(self, job_id: str, form: AnswerForm, model: str) -> None:
        self._job_id = job_id
        self._model = model
        self._splitter = form.splitter()
        self._blocks: list[dict[str, Any]] = []
        self._open: Kind | None = None
        self._arguments = ""
        """The arguments of the open use of a tool, as JSON text."""

    def first(self, n_input: int) -> Event:
        """Return the event that begins the answer.

        Args:
            n_input: Number of tokens of the prompt. The last event has the number of cached tokens.
        """
        usage = {"input_tokens": n_input, "output_tokens": 0}
        frame = {**self._frame(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": frame}

    def feed(self, piece: Chunk | Result) -> Iterator[Event]:
        """Take the next piece of the answer, or the whole answer, and yield the events for its text."""
        for part in self._splitter.feed(piece.text, piece.tag_offsets):
            yield from self._take(part)

    def finish(self, result: Result) -> Iterator[Event]:
        """End the answer, and yield the last events."""
        for part in self._splitter.finish(is_cut=result.finish_reason is not FinishReason.STOP):
            yield from self._take(part)
        if not self._blocks:
            yield from self._begin("text", {})
        yield from self._close()
        yield {"type": "message_delta", "delta": self._ending(result), "usage": usage_object(result.stats)}
        yield {"type": "message_stop"}

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the answer of a job that has ended."""
        for _ in (*self.feed(result), *self.finish(result)):
            pass
        usage = usage_object(result.stats)
        return {**self._frame(), "content": self._blocks, **self._ending(result), "usage": usage}

    def _take(self, part: Part) -> Iterator[Event]:
        match part:
            case Reasoning(text):
                yield from self._write("thinking", {"type": "thinking_delta", "thinking": text}, text)
            case Content(text):
                yield from self._write("text", {"type": "text_delta", "text": text}, text)
            case CallStarted(index, name):
                yield from self._begin("tool_use", {"id": call_id(self._job_id, index), "name": name})
            case CallArguments(_, text):
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _write(self, kind: Kind, delta: dict[str, Any], text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._begin(kind, {})
        self._blocks[-1][kind] += text
        yield self._delta(delta)

    def _begin(self, kind: Kind, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open, self._arguments = kind, ""
        block = {"type": kind, **fields, **EMPTY[kind]}
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _close(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        kind, self._open = self._open, None
        if kind is None:
            return
        if kind == "tool_use":
            self._blocks[-1]["input"] = _object_of(self._arguments)
        elif kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _frame(self) -> dict[str, Any]:
        return {"id": message_id(self._job_id), "type": "message", "role": "assistant", "model": self._model}

    def _ending(self, result: Result) -> dict[str, Any]:
        stop = result.stats.stop_string
        reason = STOP_REASONS[result.finish_reason] if stop is None else "stop_sequence"
        if reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}


def message_id(job_id: str) -> str:
    """Return the id of an answer, by the id of its job."""
    return f"msg_{job_id}"


def usage_object(stats: JobStats) -> dict[str, int]:
    """Return the usage of a job. Its input tokens are the computed tokens, without the cached tokens."""
    return {
        "input_tokens": max(stats.prompt_tokens - stats.prefix_cache_tokens, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.prefix_cache_tokens,
        "output_tokens": stats.generated_tokens,
    }


def _object_of(arguments: str) -> dict[str, Any]:
    """Return the object in a JSON text. Arguments that a client could not parse are left out, for example because they
    were cut off, or have half a surrogate pair or a number that is too large.
    """
    try:
        value = from_json(arguments, allow_inf_nan=False)
        return value if isinstance(value, dict) and is_finite(value) else {}
    except ValueError:
        return {}
