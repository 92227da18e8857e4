"""Splits answers in which tags enclose reasoning and tool calls: those of Hermes, Qwen, GLM, Llama 3 and Mistral.

White space before a call only separates it from the content, so it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llamaq.common.protocol.answer_tags import MISTRAL_CALL_ID
from llamaq.producer.answer_parts.json_call import JsonCall
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.answer_parts.tag_scanner import TagScanner
from llamaq.producer.answer_parts.xml_call import CLOSE, HEAD, OPEN, ParameterNames, XmlCall


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format. An empty tag does not exist."""

    call_open: str = ""
    call_close: str = ""
    """If empty: text after a call is content."""
    arguments_open: str = ""
    """Between the name and the arguments, where the name stands outside of the object."""
    call_separators: str = ""
    """The characters around and between calls, as a set of a regular expression."""
    starts_with_call: bool = False
    """Whether an answer that begins with an object is a call."""
    xml_call: type[XmlCall] | None = None
    """Reads calls that have tags for their parameters. Calls in JSON are recognized too."""
    text_parameters: ParameterNames = field(default_factory=dict)
    """For calls in XML: the parameters of each tool whose values are texts."""
    literal_parameters: ParameterNames = field(default_factory=dict)
    """For calls in XML: those of them that may be `null`, and booleans."""
    reasoning_open: str = ""
    reasoning_close: str = ""


State = Literal["content", "reasoning", "call", "untagged", "name", "arguments"]
"""`untagged`: in what may be a call in XML without `call_open`."""


class TaggedSplitter:
    """Splits one answer.

    Args:
        tags: The tags of the format.
        token_tags: The tags that are one token of the model's vocabulary.
        starts_in_reasoning: Whether the prompt has begun the reasoning.
        has_begun: Whether the prompt has a part of this reasoning. White space at the beginning continues it then.
    """

    def __init__(
        self,
        tags: Tags,
        token_tags: Collection[str] = (),
        *,
        starts_in_reasoning: bool = False,
        has_begun: bool = False,
    ) -> None:
        self._tags = tags
        self._scanner = TagScanner(token_tags)
        self._call_token = tags.call_open if tags.call_close and tags.call_open in token_tags else ""
        """The token that begins a call inside reasoning, which then ends without its closing tag."""
        self._resumes_at: int | None = None
        """For a tag of calls inside reasoning: where the text begins that is reasoning if it is no call."""
        self._state: State = "reasoning" if starts_in_reasoning else "content"
        self._call: JsonCall | XmlCall | None = None
        self._opened_by = ""
        """The text before the next call. It is content if that is no call."""
        self._is_tagged = False
        """Whether a tag has announced calls."""
        self._is_after_call = False
        """Whether separators now follow a call. Otherwise they may be content."""
        self._space = ""
        """White space at the end of the content so far, which may come before a call."""
        self._tail = ""
        """The end of the content so far."""
        self._n_calls = 0
        self._name = ""
        self._has_begun = False
        """Whether the answer has text that is not white space."""
        self._skips_space = starts_in_reasoning and not has_begun
        """Whether white space at the beginning of the next text is left out: it only separates parts."""

    def feed(self, text: str, tag_offsets: Sequence[int] = ()) -> list[Part]:
        """Return the parts that a further piece of the answer completes."""
        parts: list[Part] = []
        while True:
            before, tag = self._scanner.feed(text, self._awaited(), tag_offsets)
            text, tag_offsets = "", ()
            parts += self._take_scanned(before)
            if not tag:
                return parts
            parts += self._switch(tag)

    def finish(self) -> list[Part]:
        """Return the last parts. An incomplete call keeps the arguments so far. Text that is not a call is content."""
        parts = self._take_scanned(self._scanner.finish())
        parts += self._end_call(is_closed=self._state == "untagged")
        return [*parts, Content(self._space)] if self._space else parts

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """The places of the reasoning."""
        return self._scanner.marked

    def _awaited(self) -> list[str]:
        """Return the tags to find: the same ones in all states that text alone leads to."""
        tags = self._tags
        awaited: dict[State, list[str]] = {
            "reasoning": [tags.reasoning_close, self._call_token],
            "arguments": [tags.call_open],
        }
        if tags.call_close:
            awaited["call"] = [tags.call_close, tags.call_open, tags.reasoning_close]
        others = [tags.reasoning_open, tags.reasoning_close, tags.call_open, tags.arguments_open]
        if tags.xml_call is XmlCall:
            others += [tags.call_close, OPEN]
        return [tag for tag in awaited.get(self._state, others) if tag]

    def _switch(self, tag: str) -> list[Part]:
        """Act on a tag."""
        tags = self._tags
        is_text = (tag == tags.arguments_open) != (self._state == "name")
        if self._state == "content" and tag == OPEN:
            is_text = self._tail.endswith((tags.call_open, CLOSE))  # a quoted call
        elif self._state == "content" and tag == tags.call_close:
            is_text = not self._skips_space
        if is_text or (self._call is not None and self._call.can_contain(tag)):
            return self._take(tag)
        if tag == tags.arguments_open:
            self._state, self._opened_by = "arguments", ""
            self._n_calls += 1
            return [CallStarted(self._n_calls - 1, self._name.partition(MISTRAL_CALL_ID)[0].strip())]
        parts = self._end_call(closed_by=tag if tag == tags.call_close else "")
        if tag == OPEN:
            self._state, self._name, self._opened_by, self._space = "untagged", "", self._space, ""
            return parts + self._take(tag)
        if tag == tags.reasoning_open:
            self._state, self._space, self._skips_space = "reasoning", "", False
        elif tag == tags.call_open:
            if self._state == "reasoning":
                self._resumes_at = self._scanner.unmarked
            self._state, self._name = ("name" if tags.arguments_open else "call"), ""
            self._is_tagged = True
            self._opened_by, self._space, self._is_after_call = self._space + tag, "", False
        else:
            self._state = "content" if self._resumes_at is None or tag == tags.reasoning_close else "reasoning"
            self._skips_space, self._resumes_at = self._is_after_call or tag == tags.reasoning_close, None
        return parts

    def _take_scanned(self, text: str) -> list[Part]:
        """Return the parts of text that the scanner has returned."""
        if self._state == "reasoning":
            self._scanner.mark(text)
        return self._take(text)

    def _take(self, text: str) -> list[Part]:
        """Return the parts of text without tags."""
        match self._state:
            case "untagged":
                return self._take_untagged(text)
            case "call":
                return self._take_call(text)
            case "name":
                return self._take_name(text)
            case "arguments":
                return [CallArguments(self._n_calls - 1, text)] if text else []
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if not text:
            return []
        if self._state == "reasoning":
            return [Reasoning(text)]
        text = self._space + text
        call = text.lstrip()
        if not self._has_begun and call:
            self._has_begun = True
            if self._tags.starts_with_call and call.startswith("{"):
                self._state, self._space, self._opened_by = "call", "", text[: -len(call)]
                return self._take_call(call)
        holds_space = self._tags.call_open or (self._tags.starts_with_call and not self._has_begun)
        n_content = len(text.rstrip()) if holds_space else len(text)
        content, self._space = text[:n_content], text[n_content:]
        self._tail = (self._tail + content)[-len(CLOSE) :]
        return [Content(content)] if content else []

    def _take_name(self, text: str) -> list[Part]:
        """Read the name of a call. An object or a list in its place is a call in the older form."""
        self._name += text
        if not self._name.lstrip().startswith(("[", "{")):
            return []
        self._state = "call"
        return self._take_call(self._name)

    def _take_untagged(self, text: str) -> list[Part]:
        self._name = (self._name + text)[:200]
        if HEAD.match(self._name) is None:
            return self._end_call() + self._take(text)
        return self._take_call(text)

    def _take_call(self, text: str) -> list[Part]:
        tags, parts = self._tags, list[Part]()
        while text:
            if self._call is None:
                is_first = tags.call_close and not self._is_after_call
                separators = r"\s" if is_first else tags.call_separators
                rest = re.sub(rf"\A[{separators}]*", "", text)
                if not self._is_after_call:
                    self._opened_by += text.removesuffix(rest)
                if not (text := rest):
                    break
                # Content in JSON may have a name too: without a tag before it, only its arguments show a call.
                self._call = (
                    tags.xml_call(self._n_calls, tags.text_parameters, tags.literal_parameters)
                    if tags.xml_call and not text.startswith("{")
                    else JsonCall(self._n_calls, needs_arguments=tags.starts_with_call and not self._is_tagged)
                )
            new, text = self._call.feed(text)
            parts += new
            if self._call.has_ended:
                parts += self._end_call()
                if self._state == "content":
                    self._skips_space = self._is_after_call
                    return parts + self._take(text)
        return parts

    def _end_call(self, closed_by: str = "", *, is_closed: bool = True) -> list[Part]:
        call, self._call = self._call, None
        text, self._opened_by = self._opened_by, ""
        is_untagged = self._state == "untagged"
        if is_untagged:
            self._state = "content"
        if call is not None:
            if isinstance(call, XmlCall):
                call.is_closed = is_closed
            last = call.finish()
            if is_untagged and not call.text.rstrip().endswith(CLOSE):
                last = None
            self._is_after_call = last is not None
            if last is not None:
                self._n_calls += 1
                self._resumes_at = None
                return last
            text += call.text
        elif self._state == "name":
            text += self._name
        if not self._is_after_call:
            text += closed_by
        if self._state == "content":
            return self._take(text)
        if self._resumes_at is None or not text:
            return [Content(text)] if text else []
        self._scanner.unmarked = self._resumes_at
        self._scanner.mark(text)
        self._resumes_at += len(text)
        return [Reasoning(text)]
