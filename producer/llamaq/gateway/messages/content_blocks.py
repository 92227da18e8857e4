"""Turns the messages of Anthropic's API, whose contents are lists of blocks, into the messages of a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest

Message = dict[str, Any]
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*;?)*\s*")
"""The text with which Claude Code begins its system prompt. It is for Anthropic's servers, and no instruction. A part
of it changes with each request, so no prefix cache would be of use."""


def read_system(value: Any) -> list[Message]:
    """Return the system message that `system` means, as a list of at most one.

    Raises:
        InvalidRequest: It is neither a text nor a list of text blocks.
    """
    text = _text_of("system", value, _blocks_of("system", value)) if value else ""
    text = BILLING_HEADER.sub("", text)
    return [{"role": "system", "content": text}] if text else []


def read_message(place: str, message: Any) -> list[Message]:
    """Return the messages of a chat for one message of the API. Results of tools become separate messages.

    Raises:
        InvalidRequest: It has a form that is not supported. The message names it.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{place}.role: user or assistant is required")
    place, content = f"{place}.content", message.get("content")
    blocks = _blocks_of(place, content)
    if role == "assistant":
        return [_read_answer(place, content, blocks)]
    results = [(number, block) for number, block in blocks if block["type"] == "tool_result"]
    others = [(number, block) for number, block in blocks if block["type"] != "tool_result"]
    messages = [_read_result(f"{place}.{number}", block) for number, block in results]
    if others or not results:
        messages.append({"role": role, "content": _text_of(place, content, others)})
    return messages


Blocks = list[tuple[int, Mapping[str, Any]]]
"""Blocks with their numbers, for messages of errors."""


def _blocks_of(place: str, content: Any) -> Blocks:
    """Return the blocks of a content. A text has none."""
    if isinstance(content, str):
        return []
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}: a text or a list of blocks is required")
    for number, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f"{place}.{number}: a block with a type is required")
    return list(enumerate(content))


def _text_of(place: str, content: Any, blocks: Blocks) -> str:
    """Return the text of a content, whose blocks must be texts."""
    if isinstance(content, str):
        return content
    texts = []
    for number, block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "text"}:
                raise InvalidRequest(f"{place}.{number}.text: a text is required")
            case {"type": kind}:
                raise InvalidRequest(
                    f"{place}.{number}.type: llamaq does not support blocks of the type {kind[:50]!r} here"
                )
    return "\n".join(texts)


def _read_answer(place: str, content: Any, blocks: Blocks) -> Message:
    """Return an earlier answer: its reasoning, its text and its calls."""
    texts, calls, reasoning = [], [], ""
    for number, block in blocks:
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                reasoning += text
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(call), "name": str(name), "input": Mapping() as arguments}:
                function = {"name": name, "arguments": dict(arguments)}
                calls.append({"id": call, "type": "function", "function": function})
            case {"type": "tool_use"}:
                raise InvalidRequest(f"{place}.{number}: the texts id and name and the object input are required")
            case _:
                texts.append((number, block))
    message: Message = {"role": "assistant", "content": _text_of(place, content, texts)}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _read_result(place: str, block: Mapping[str, Any]) -> Message:
    """Return the result of a tool. A chat template has no field for `is_error`: the text of the result must tell it.

    The text of an error that has none is `Error`. Otherwise the model would read an empty result of a call that worked.
    """
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidRequest(f"{place}.tool_use_id: the id of a tool_use is required")
    content = block.get("content") or ""
    text = _text_of(f"{place}.content", content, _blocks_of(f"{place}.content", content))
    if block.get("is_error") is True and not text.strip():
        text = "Error"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
