"""Builds the items of a response's output from the parts of its answer, and the events of these items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from llamaq.producer.answer_parts.answer_format import AnswerForm
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.openai_format.tools import call_id

Event = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call"]

PREFIXES: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class PartForm(NamedTuple):
    """The form of the only part of an item."""

    field: str
    """The field of the item that has the part."""
    type: str
    text_event: str
    """The name of the events with its text."""
    event: str
    """The name of the events of its beginning and end."""


SUMMARY = PartForm("summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part")
"""The form of reasoning for clients that ask for a summary. The summary is the whole reasoning."""
PARTS = {
    "message": PartForm("content", "output_text", "output_text", "content_part"),
    "reasoning": PartForm("content", "reasoning_text", "reasoning_text", "content_part"),
}


class OutputItems:
    """The output of one response: reasoning, messages and calls, in the order of the answer.

    Args:
        job_id: The job of the response.
        form: The form of its answer.
        has_summary: Whether the events of reasoning are those of a summary.
        names: The fields `name` and `namespace` of calls, by the names that the model writes. Other names have no
            namespace.
    """

    def __init__(
        self,
        job_id: str,
        form: AnswerForm,
        *,
        has_summary: bool = False,
        names: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self.items: list[dict[str, Any]] = []
        """The items so far. The last one may be open."""
        self._job_id = job_id
        self._names = names
        self._splitter = form.splitter()
        self._parts = PARTS | {"reasoning": SUMMARY} if has_summary else PARTS
        self._open: Kind | None = None
        self._logprobs: list[dict[str, Any]] = []
        """Probabilities of the tokens that have not completed a part yet. They belong to the next part."""

    def feed(
        self, text: str, logprobs: Sequence[dict[str, Any]] = (), tag_offsets: Sequence[int] = ()
    ) -> Iterator[Event]:
        """Take the next text of the answer, and yield the events for it.

        Args:
            text: The text.
            logprobs: The probabilities of its tokens.
            tag_offsets: Positions in the answer, in characters, of further tokens that are tags. Their text may follow.
        """
        self._logprobs += logprobs
        for part in self._splitter.feed(text, tag_offsets):
            yield from self._take(part)
            self._logprobs = []

    def finish(self, *, is_complete: bool) -> Iterator[Event]:
        """End the answer, and yield the last events."""
        for part in self._splitter.finish(is_cut=not is_complete):
            yield from self._take(part)
        if not self.items:
            yield from self._take(Content(""))
        yield from self._close("completed" if is_complete else "incomplete")

    def _take(self, part: Part) -> Iterator[Event]:
        match part:
            case Reasoning(text):
                yield from self._write("reasoning", text)
            case Content(text):
                yield from self._write("message", text)
            case CallStarted(index, name):
                named = self._names.get(name, {"name": name})
                call = {"call_id": call_id(self._job_id, index), **named, "arguments": ""}
                yield from self._begin("function_call", call)
            case CallArguments(_, text):
                yield from self._write("function_call", text)

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._begin(kind, {"summary": []} if kind == "reasoning" else {"role": "assistant"})
        if kind == "function_call":
            self.items[-1]["arguments"] += text
            yield self._event("response.function_call_arguments.delta", delta=text)
            return
        form = self._parts[kind]
        part = self.items[-1][form.field][0]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += self._logprobs
            more = {"logprobs": self._logprobs}
        if text:
            yield self._event(f"response.{form.text_event}.delta", **_first(form), delta=text, **more)

    def _begin(self, kind: Kind, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = kind
        number = len(self.items)
        item = {"id": f"{PREFIXES[kind]}_{self._job_id}_{number}", "type": kind, "status": "in_progress", **fields}
        empty: dict[str, Any] = {} if kind == "function_call" else {"content": []}
        self.items.append(item | empty)
        yield {"type": "response.output_item.added", "output_index": number, "item": item | empty}
        if (form := self._parts.get(kind)) is not None:
            self.items[-1][form.field] = [_empty_part(form)]
            yield self._event(f"response.{form.event}.added", **_first(form), part=_empty_part(form))

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        kind, self._open = self._open, None
        if kind is None:
            return
        item = self.items[-1]
        item["status"] = status
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            form = self._parts[kind]
            (part,) = item[form.field]
            shown = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"response.{form.text_event}.done", **_first(form), **shown)
            yield self._event(f"response.{form.event}.done", **_first(form), part=part)
            if form is SUMMARY:
                item["content"] = [{"type": PARTS[kind].type, "text": part["text"]}]
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _empty_part(form: PartForm) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if form.type == "output_text" else {}
    return {"type": form.type, "text": "", **more}


def _first(form: PartForm) -> dict[str, int]:
    """Return the index of the first part."""
    return {f"{form.field}_index": 0}
