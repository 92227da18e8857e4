"""A chat as a job's prompt: the messages, and what the model's chat template gets in addition."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from llamaq.common.protocol.wire_model import JsonObject, StrictModel

MAX_TOOLS = 512
MAX_TOOL_CALLS = 128
TEMPLATE_NAMES = frozenset({
    "messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now",
    "functions", "function_call", "tool_choice",
})  # fmt: skip
"""Variables of a chat template that `chat_template_kwargs` cannot set."""


class FunctionCall(StrictModel):
    """A call of a function that the model asked for."""

    name: str = Field(min_length=1, max_length=256, description="Name of the function.")
    arguments: str | JsonObject = Field(
        description="The arguments: an object, or its JSON text. A blank text means an empty object. Chat templates "
        "get the object, or its JSON text if they refuse the object. Special tokens in the arguments are not parsed."
    )


class ToolCall(StrictModel):
    """A call of a tool in a message of the assistant, in the form of the OpenAI API."""

    id: str | None = Field(
        default=None, max_length=256, description="Id of the call, which the answer of the tool repeats."
    )
    type: Literal["function"] = Field(default="function", description="Kind of the tool.")
    function: FunctionCall = Field(description="The called function.")


class Message(StrictModel):
    """One message of a chat."""

    role: str = Field(
        pattern=r"^[a-z_]{1,32}$",
        description="Author of the message, such as `system`, `user` or `assistant`: 1 to 32 small letters or `_`.",
    )
    content: str = Field(
        default="",
        description="Plain text. Special tokens in it are not parsed. It may be left out where there are `tool_calls`.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_\-]{1,64}$",
        description="Name of the author, for chat templates that show it: 1 to 64 letters, digits, `_` or `-`.",
    )
    tool_calls: tuple[ToolCall, ...] | None = Field(
        default=None, max_length=MAX_TOOL_CALLS, fail_fast=True, description="Tools that the assistant called."
    )
    tool_call_id: str | None = Field(
        default=None, max_length=256, description="Id of the call that a message of the role `tool` answers."
    )
    reasoning_content: str | None = Field(
        default=None,
        description="Reasoning of the assistant before its content, for chat templates that show it. Special tokens in "
        "it are not parsed.",
    )

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content: a text is required")
        return self

    @model_serializer(mode="wrap")
    def _keep_content(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keep a content that was given, even if it is empty: a message without `content` is refused."""
        values: dict[str, Any] = handler(self)
        return values | ({"content": self.content} if "content" in self.model_fields_set else {})


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a chat template gets in addition to the messages. Hashable: objects are JSON texts."""

    tools: str = "null"
    kwargs: str = "{}"
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TemplateParams(BaseModel):
    """The parameters of a chat template."""

    tools: tuple[JsonObject, ...] | None = Field(
        default=None,
        max_length=MAX_TOOLS,
        fail_fast=True,
        description="Tools that the model may call, in the form of the OpenAI API. The chat template shows them to the "
        "model. Only for chats.",
    )
    chat_template_kwargs: JsonObject = Field(
        default_factory=dict,
        description='Further variables of the chat template, such as `{"enable_thinking": false}`. Only for chats.',
    )
    add_generation_prompt: bool = Field(
        True, description="The rendered chat ends with the beginning of an answer of the assistant. Only for chats."
    )
    continue_final_message: bool = Field(
        False,
        description="The output continues the last message instead of answering it: its content, or its reasoning if "
        "there is no content. Only for chats.",
    )

    @model_validator(mode="after")
    def _check_kwargs(self) -> Self:
        if taken := sorted(TEMPLATE_NAMES & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs: {', '.join(taken)} cannot be set here")
        return self

    @property
    def template_options(self) -> TemplateOptions:
        """These parameters in the form that the vocabulary takes."""
        return TemplateOptions(
            json.dumps(self.tools),
            json.dumps(self.chat_template_kwargs, sort_keys=True),
            self.add_generation_prompt,
            self.continue_final_message,
        )

    @property
    def template_fields(self) -> tuple[str, ...]:
        """The names of the parameters that are not at their defaults."""
        return tuple(name for name, default in _template_defaults().items() if getattr(self, name) != default)


@cache
def _template_defaults() -> dict[str, Any]:
    """Return the defaults of `TemplateParams`. Cached, because pydantic takes long to compute a default."""
    fields = TemplateParams.model_fields.items()
    # pydantic 2.10.0 requires `validated_data`, even if no default factory reads it.
    return {name: field.get_default(call_default_factory=True, validated_data={}) for name, field in fields}


def message_for_template(message: Message) -> dict[str, Any]:
    """Return a message as chat templates read it: without fields that are not set, arguments as objects."""
    values = message.model_dump(exclude_none=True)
    for call in values.get("tool_calls", ()):
        call["function"]["arguments"] = arguments_as_object(call["function"]["arguments"])
    return values


def arguments_as_object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the arguments of a call as chat templates read them: an object, or the text if it is no JSON object.

    Some servers send a blank text or `null` for a call without arguments.
    """
    if isinstance(arguments, dict):
        return arguments
    if arguments.strip() in ("", "null"):
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
