"""Builds the chunks of a streamed completion of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llamaq.common.protocol.job_outcome import Result
from llamaq.gateway.completions.function_call import as_function_call
from llamaq.gateway.timings import timings_object
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.response_body import FINISH_REASONS, stop_reason, usage_object
from llamaq.producer.openai_format.tools import call_id


@dataclass(frozen=True, slots=True)
class StreamChunks:
    """The chunks of one answer, which all have the same id."""

    endpoint: Endpoint
    id: str
    model: str
    created_s: int
    fingerprint: str
    has_functions: bool = False
    """Whether calls have the form of `functions`, see `as_function_call`."""

    def first(self, index: int) -> dict[str, Any]:
        """Return the chunk that begins a choice of a chat."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": None}})

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the chunk with the next text of a choice."""
        content: dict[str, Any] = {"delta": {"content": text}} if self.endpoint is Endpoint.CHAT else {"text": text}
        return self._chunk(index, content, logprobs=logprobs)

    def delta(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the chunk with the next part of a choice of a chat."""
        return self._chunk(index, {"delta": delta}, logprobs=logprobs)

    def part(self, index: int, part: Part, job_id: str) -> dict[str, Any]:
        """Return the chunk with a part of the answer of a job."""
        delta = delta_of(part, job_id)
        return self.delta(index, as_function_call(delta) if self.has_functions else delta)

    def empty(self, index: int) -> dict[str, Any]:
        """Return a chunk of a choice without text."""
        return self._chunk(index, self._no_content)

    def last(self, index: int, result: Result, *, is_call: bool = False) -> dict[str, Any]:
        """Return the chunk that ends a choice, which may have ended with a tool call."""
        reason = FINISH_REASONS[result.finish_reason]
        if is_call and reason == "stop":
            reason = "function_call" if self.has_functions else "tool_calls"
        chunk = self._chunk(index, self._no_content, reason)
        chunk["choices"][0] |= stop_reason(result)
        return chunk | {"timings": timings_object(result.stats)}

    def usage(self, results: Sequence[Result], n: int, n_reasoning: int) -> dict[str, Any]:
        """Return the chunk after the last choice, which has the usage of all choices, `n` for each prompt."""
        usage = usage_object(*(result.stats for result in results), n=n, n_reasoning=n_reasoning)
        return self._frame([]) | {"usage": usage, "timings": timings_object(results[0].stats)}

    @property
    def _no_content(self) -> dict[str, Any]:
        return {"delta": {}} if self.endpoint is Endpoint.CHAT else {"text": ""}

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return self._frame([{"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}])

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.endpoint is Endpoint.CHAT else "text_completion",
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def delta_of(part: Part, job_id: str) -> dict[str, Any]:
    """Return the `delta` of a chunk with one part of the answer of a job."""
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStarted(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id(job_id, index), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
