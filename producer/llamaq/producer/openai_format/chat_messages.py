"""Reads the messages of a chat in the forms of the OpenAI API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.chat import FunctionCall, Message, TemplateParams, ToolCall
from llamaq.common.protocol.job_request import MAX_MESSAGES
from llamaq.producer.openai_format.tools import with_allowed_tools, with_tools_of_functions

TEMPLATE_FIELDS = frozenset(TemplateParams.model_fields)
"""Options of a job that only its chat template reads."""
ROLES = {"developer": "system"}
"""Maps a role of the OpenAI API that chat templates do not know to a role with the same meaning."""
MAX_NAME_CHARS = 64
"""Length of the name of an author. Other servers accept any name, such as that of a person, or `server.tool`."""
UNSUPPORTED = ("audio", "function_call", "tool_calls")
"""Fields of a message whose loss would change the answer."""


def read_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages of a body, and what else the chat template reads, as arguments of a job.

    If the last message is the assistant's, the answer continues it, as with llama-server and Anthropic's API.

    Raises:
        InvalidRequest: There are no messages, or one has a form that is not supported. The message names it.
    """
    messages = _without_empty_answer(read_messages(body), body)
    body = with_allowed_tools(with_tools_of_functions(body))
    chat: dict[str, Any] = {"messages": messages}
    if body.get("tool_choice") == "none" or body.get("tools") == []:  # templates print a list even if it is empty
        body = {**body, "tools": None}
    chat |= {name: body[name] for name in TEMPLATE_FIELDS if body.get(name) is not None}
    if kwargs := with_effort(body.get("chat_template_kwargs"), body.get("reasoning_effort")):
        chat["chat_template_kwargs"] = kwargs
    check_encodable("tools", chat.get("tools"))
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        if "continue_final_message" not in chat and [each["role"] for each in messages[-2:]] == ["assistant"] * 2:
            raise InvalidRequest("messages: the last two are the assistant's; join them, or set continue_final_message")
        chat.setdefault("continue_final_message", "add_generation_prompt" not in chat)
    if chat.get("continue_final_message"):
        if chat.get("add_generation_prompt"):
            raise InvalidRequest("add_generation_prompt: it excludes continue_final_message; set one of them")
        chat["add_generation_prompt"] = False
    return chat


def _without_empty_answer(messages: list[dict[str, Any]], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages without an empty last message of the assistant: to continue it is to begin an answer.

    Programs that show an answer while it is generated send the empty message that they have prepared for it.
    """
    last = messages[-1]
    has_parts = last["content"].strip() or last.keys() & {"tool_calls", "reasoning_content"}
    says_how = any(body.get(name) is not None for name in ("add_generation_prompt", "continue_final_message"))
    is_left_out = last["role"] == "assistant" and len(messages) > 1 and not has_parts and not says_how
    return messages[:-1] if is_left_out else messages


def check_encodable(name: str, value: Any) -> None:
    """Check that a command to a worker can contain a value.

    Raises:
        InvalidRequest: The value has a number or a text that cannot be encoded. The message begins with `name`.
    """
    try:
        codec.encode_values([value])
    except (OverflowError, ValueError) as exc:
        raise InvalidRequest(f"{name}: it has an integer of more than 64 bits, or invalid Unicode") from exc


def with_effort(kwargs: Any, effort: Any) -> dict[str, Any]:
    """Return the variables of a chat template with the effort of the reasoning. Variables of the request take
    precedence.

    Args:
        kwargs: The variables of the request. None: it has none.
        effort: The effort of OpenAI's API: `none`, `low`, `medium` or another. None: the model's default.

    Raises:
        InvalidRequest: One of the arguments has another type, or a value that cannot be encoded.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidRequest("chat_template_kwargs: an object is required")
    check_encodable("chat_template_kwargs", kwargs)
    if effort is None:
        return dict(kwargs or {})
    if not isinstance(effort, str):
        raise InvalidRequest("reasoning_effort: a text is required, such as low")
    by_effort: dict[str, Any] = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return by_effort | dict(kwargs or {})


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a body as arguments of a job. Fields that templates do not read are left out.

    Raises:
        InvalidRequest: There are no messages, or one has a form that is not supported. The message names it.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: a list of messages is required")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: {len(messages)} messages are more than {MAX_MESSAGES}")
    return [_read_message(number, message) for number, message in enumerate(_with_calls_of_functions(messages))]


def _with_calls_of_functions(messages: list[Any]) -> list[Any]:
    """Return messages that have calls of tools in place of calls of functions, see `with_tools_of_functions`.

    These calls have no ids, but some chat templates require them, as nine letters or digits. The result of a function
    answers the last call.
    """
    changed, call_id = [], None
    for number, message in enumerate(messages):
        match message:
            case {"function_call": Mapping() as call, **rest}:
                call_id = f"{number:09d}"
                changed.append({**rest, "tool_calls": [{"id": call_id, "type": "function", "function": call}]})
            case {"role": "function", **rest}:
                changed.append({**rest, "role": "tool", "tool_call_id": call_id})
            case _:
                changed.append(message)
    return changed


def _read_message(number: int, message: Any) -> dict[str, Any]:
    place = f"messages.{number}"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{place}: an object with role and content is required")
    known = Message.model_fields.keys()
    for name in UNSUPPORTED:
        if message.get(name) and name not in known:
            raise InvalidRequest(f"{place}.{name}: llamaq does not support it; leave it out")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{place}.role: a text is required, such as user")
    read = {name: value for name, value in message.items() if name in known and value is not None}
    read["role"] = ROLES.get(role, role)
    content = message.get("content")
    if content is None and role not in ("assistant", "tool"):  # a tool may have returned nothing
        raise InvalidRequest(f"{place}.content: a text is required")
    if role == "assistant":
        content, thinking = _without_thinking(content)
        reasoning = thinking or message.get("reasoning")  # the name that vLLM and OpenRouter have for the field
        read = ({"reasoning_content": reasoning} if reasoning and isinstance(reasoning, str) else {}) | read
    read["content"] = _read_content(f"{place}.content", "" if content is None else content)
    if isinstance(name := read.pop("name", None), str) and name:
        read["name"] = re.sub(r"[^A-Za-z0-9_\-]", "_", name)[:MAX_NAME_CHARS]
    if isinstance(calls := read.get("tool_calls"), list):
        read["tool_calls"] = [_read_call(call) for call in calls]
        check_encodable(f"{place}.tool_calls", read["tool_calls"])
    return read


def _without_thinking(content: Any) -> tuple[Any, str]:
    """Return the content of an earlier answer without its parts of reasoning, and the text of the reasoning.

    LiteLLM sends the blocks of Anthropic's API in this form to vLLM's servers, which accept it. Encrypted reasoning is
    left out.
    """
    if not isinstance(content, list):
        return content, ""
    kept, reasoning = [], ""
    for part in content:
        match part:
            case {"type": "thinking", "thinking": str(text)}:
                reasoning += text
            case {"type": "redacted_thinking"}:
                pass
            case _:
                kept.append(part)
    return kept, reasoning


def _read_call(call: Any) -> Any:
    """Return a tool call with only the fields that templates read. The job refuses values of a wrong type.

    Clients that join the deltas of a stream repeat the field `index` of the deltas. Some servers send `null` as the
    arguments of a call without arguments.
    """
    if not isinstance(call, Mapping):
        return call
    read = {name: value for name, value in call.items() if name in ToolCall.model_fields and value is not None}
    if isinstance(function := read.get("function"), Mapping):
        known = {name: value for name, value in function.items() if name in FunctionCall.model_fields}
        read["function"] = known | ({"arguments": "{}"} if known.get("arguments", "") is None else {})
    return read


def _read_content(place: str, content: Any) -> str:
    """Return the text of a content, which may be a list of parts. As in llama-server, each begins on a new line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}: a text or a list of parts is required")
    return "\n".join(_read_part(f"{place}.{number}", part) for number, part in enumerate(content))


def _read_part(place: str, part: Any) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)} | {
            "type": "refusal",
            "refusal": str(text),
        }:
            return text
        case {"type": str(kind)}:
            raise InvalidRequest(f"{place}.type: llamaq supports parts of the type text, not {kind[:50]!r}")
    raise InvalidRequest(f"{place}: a part of the form {{'type': 'text', 'text': …}} is required")
