"""Forms of job options that users of OpenAI's API, llama.cpp and llama_cpp_ex write.

A form with only one possible meaning is translated here, before the request is validated, so that messages in Redis
have only one form. An unknown name is refused, and the error contains the name that is probably meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.job_request import JobRequest

SYNONYMS = {
    "id_slot": "slot",
    "include_stop_str_in_output": "include_stop",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "mirostat_ent": "mirostat_tau",
    "mirostat_lr": "mirostat_eta",
    "n_predict": "max_tokens",
    "penalty_freq": "frequency_penalty",
    "penalty_present": "presence_penalty",
    "penalty_repeat": "repeat_penalty",
    "reasoning_budget_tokens": "reasoning_budget",
    "repeat_last_n": "penalty_last_n",
    "repetition_penalty": "repeat_penalty",
    "return_progress": "prompt_progress",
    "stop_sequences": "stop",
    "temp": "temperature",
    "thinking_budget_tokens": "reasoning_budget",
    "thinking_token_budget": "reasoning_budget",
    "typ_p": "typical_p",
}
"""Maps the name of an option in another program to our name. Both mean the same, in the same unit."""

UNSET_BY_MINUS_ONE = frozenset({"max_tokens", "reasoning_budget", "seed", "slot"})
"""Options for which -1 means "not set" in llama.cpp."""

HINTS = {
    "input": "use the call embed, or for a chat messages",
    "model": "the queue of the client selects the model",
    "n": "a job generates one text: submit several jobs",
    "n_probs": "use logprobs, the number of alternatives at each position",
    "response_format": "use json_schema, with the schema itself",
    "system": "add a message with the role system",
    "t_max_predict_ms": "use generation_timeout_s, in seconds",
    "timeout": "use timeout_s, the longest running time of the job",
    "tool_choice": "use chat_answers, which reads the calls of tools",
    "top_logprobs": "use logprobs, the number of alternatives at each position",
    "user": "use metadata",
}
"""What to do instead, for names of other programs without a synonym."""


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `JobRequest` that the caller's options and prompt mean.

    Raises:
        InvalidRequest: There is no option of this name, or an option has different values under two names.
    """
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    """For each given option: the name that the caller wrote."""
    for written, value in values.items():
        name = SYNONYMS.get(written, written)
        if name not in JobRequest.model_fields:
            raise InvalidRequest(f"{written}: there is no such option{_hint(written)}")
        if value is None or (name in UNSET_BY_MINUS_ONE and not isinstance(value, bool) and value == -1):
            continue
        if name in given and given[name] != value:
            raise InvalidRequest(
                f"{names[name]}={given[name]!r}, {written}={value!r}: both names mean {name}, with different values: "
                "give one of them"
            )
        given[name], names[name] = value, written
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if "messages" in given:
        given["messages"] = _join_parts(given["messages"])
    return given


def _hint(name: str) -> str:
    """Return what to write instead of an unknown name, as the end of a sentence. Empty: nothing is similar."""
    if name in HINTS:
        return f"; {HINTS[name]}"
    close = get_close_matches(name, [*JobRequest.model_fields, *SYNONYMS], n=1)
    return f"; did you mean {SYNONYMS.get(close[0], close[0])}?" if close else ""


def _join_parts(messages: Any) -> Any:
    """Return the messages with plain contents. OpenAI's API also allows a list of parts: each begins on its own line.

    Raises:
        InvalidRequest: This is no list, or a message has no text.
    """
    if isinstance(messages, str | bytes):
        raise InvalidRequest("messages: a list of messages is required, not a text")
    if isinstance(messages, Mapping | Message):
        raise InvalidRequest("messages: a list of messages is required, not one message")
    if not isinstance(messages, Sequence):
        return messages  # the validation refuses it
    return [_join_message(index, message) for index, message in enumerate(messages)]


def _join_message(index: int, message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if content is None or (isinstance(content, Sequence) and not isinstance(content, str) and not content):
        raise InvalidRequest(
            f"messages.{index}.content: the message has no text: give it one, or leave the message out"
        )
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    return {**message, "content": "\n".join(_texts_of(content, f"messages.{index}.content"))}


def _texts_of(parts: Sequence[Any], place: str) -> Iterator[str]:
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{place}.{number}: only parts of the form {{'type': 'text', 'text': …}} are supported"
            )
        yield text
