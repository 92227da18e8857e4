"""Turns the items of the Responses API into the messages of a chat, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.responses.record import ResponseRecord
from llamaq.gateway.responses.tools import flat_name
from llamaq.producer.openai_format.chat_messages import read_messages

Messages = list[dict[str, Any]]


def read_instructions(body: Mapping[str, Any]) -> Messages:
    """Return the system message that `instructions` means, as a list of at most one.

    Raises:
        InvalidRequest: It is no text.
    """
    instructions = body.get("instructions")
    if instructions is None or instructions == "":
        return []
    if not isinstance(instructions, str):
        raise InvalidRequest("instructions: a text is required")
    return [{"role": "system", "content": instructions}]


def read_input(value: Any) -> Messages:
    """Return the messages that `input` means: a text, or a list of items.

    Raises:
        InvalidRequest: It has a form that is not supported.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input: a text or a list of items is required")
    messages: Messages = []
    for number, item in enumerate(value):
        _add_item(messages, f"input.{number}", item)
    try:
        # A last item of reasoning has no message that it belongs to.
        return read_messages({"messages": [each for each in messages if each.keys() - {"role", "reasoning_content"}]})
    except InvalidRequest as exc:
        raise InvalidRequest(str(exc).replace("messages", "input", 1)) from exc


def _add_item(messages: Messages, place: str, item: Any) -> None:
    """Add the content of an item to the messages. Reasoning, text and calls of the assistant become one message."""
    if not isinstance(item, Mapping):
        raise InvalidRequest(f"{place}: an object is required")
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            _of_assistant(messages, "content")["content"] = item.get("content")
        case "message":
            messages.append(dict(item))
        case "reasoning":
            _of_assistant(messages, "reasoning_content")["reasoning_content"] = _reasoning_of(place, item)
        case "function_call":
            calls = _of_assistant(messages, "").setdefault("tool_calls", [])
            calls.append(_call_of(place, item))
        case "function_call_output":
            output = item.get("output")
            if not isinstance(item.get("call_id"), str) or not isinstance(output, str | list):
                raise InvalidRequest(f"{place}: call_id, a text, and output, a text or a list of parts, are required")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        case kind:
            raise InvalidRequest(
                f"{place}.type: llamaq supports items of the types message, reasoning, function_call and "
                f"function_call_output, not {str(kind)[:50]!r}"
            )


def _of_assistant(messages: Messages, field: str) -> dict[str, Any]:
    """Return the last message if it is the assistant's and may still get this field, otherwise a new one.

    The fields of an answer have an order: reasoning, content, calls.
    """
    later = {"reasoning_content": ("reasoning_content", "content", "tool_calls"), "content": ("content", "tool_calls")}
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in later.get(field, ())):
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning_of(place: str, item: Mapping[str, Any]) -> str:
    """Return the text of an item of reasoning, or its summary if the item does not have the whole text."""
    for name in ("content", "summary"):
        match item.get(name):
            case None | []:
                continue
            case [*parts] if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
                return "".join(part["text"] for part in parts)
            case _:
                raise InvalidRequest(f"{place}.{name}: a list of parts with text is required")
    return ""


def _call_of(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    match item:
        case {"call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            return {
                "id": call_id,
                "type": "function",
                "function": {"name": flat_name(item.get("namespace"), name), "arguments": arguments},
            }
    raise InvalidRequest(f"{place}: the texts call_id, name and arguments are required")


def input_items(job_id: str, record: ResponseRecord) -> list[dict[str, Any]]:
    """Return the messages that came with the request of a response as the items of `/v1/responses/{id}/input_items`."""
    names = record.names_in_namespaces
    items = [item for message in record.new_messages for item in _items_of(message, names)]
    prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    return [
        {"id": f"{prefixes[item['type']]}_{job_id}_in{number}", **item, "status": "completed"}
        for number, item in enumerate(items)
    ]


def _items_of(message: Mapping[str, Any], names: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id") or "", "output": content}
        return
    if reasoning := message.get("reasoning_content"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]}
    calls = message.get("tool_calls") or ()
    if content or not calls:
        is_answer = message["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        yield {"type": "message", "role": message["role"], "content": [{**part, "text": content}]}
    for call in calls:
        named = names.get(call["function"]["name"], {})
        yield {"type": "function_call", "call_id": call.get("id") or "", **call["function"], **named}
