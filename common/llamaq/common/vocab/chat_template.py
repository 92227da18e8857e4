"""Renders chats with the chat template of a model, in the sandbox of Jinja."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.chat import Message, TemplateOptions, message_for_template
from llamaq.common.vocab.system_messages import with_one_system_message

_THINKING = (".thinking", "['thinking']", '["thinking"]')


class ChatTemplate:
    """A compiled chat template.

    Args:
        template: The text of the template, in Jinja.
        eos: The text of the token that ends a generation.
        bos: The text of the token that a prompt begins with.

    Raises:
        JobRejected: The template does not compile.
    """

    def __init__(self, template: str, *, eos: str, bos: str) -> None:
        try:
            self._with_prompt = Jinja2ChatFormatter(template, eos, bos)
            self._without_prompt = Jinja2ChatFormatter(template, eos, bos, add_generation_prompt=False)
        except Exception as exc:  # jinja2 raises errors of several kinds for a broken template
            raise JobRejected(ErrorCode.CHAT_TEMPLATE, f"the model's chat template does not compile: {exc}") from exc
        self._reads_thinking = "reasoning_content" not in template and any(name in template for name in _THINKING)
        """Whether the template reads reasoning as `thinking`, as those of gpt-oss and LFM2.5 do."""
        self._refuses_both = "both content and thinking" in template
        """Whether the template refuses content and reasoning beside calls, as that of gpt-oss does."""

    def render(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        """Return the chat as text.

        Raises:
            JobRejected: The template raises an error, or the last message cannot be continued.
        """
        if options.continue_final_message:
            return self._render_open(messages, options)
        return self._render(
            self._with_prompt if options.add_generation_prompt else self._without_prompt, messages, options
        )

    def _render_open(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        """Return the chat up to the end of the last message's content, so that the output continues this content.

        Without a content, it is the end of the reasoning.

        A marker finds the end. The content itself would not: the template's text after it may contain it too, as
        `<|im_end|>` contains `end`. Templates often remove the white space around a content. Then the result does not
        end with white space either.
        """
        last = messages[-1]
        field = "reasoning_content" if last.reasoning_content and not last.content.strip() else "content"
        text: str = getattr(last, field)
        core = text.rstrip()
        tail = text[len(core) :]
        marker = f"{secrets.randbelow(10**24):024}"  # digits, because a template may change the case of letters
        marked = last.model_copy(update={field: core + marker + tail})
        rendered = self._render(self._without_prompt, [*messages[:-1], marked], options)
        before, _, after = rendered.rpartition(marker)
        if not core or not before.endswith(core.lstrip()):
            message = f"continue_final_message: the rendered chat does not contain the {field} of the last message"
            raise JobRejected(ErrorCode.CHAT_TEMPLATE, message)
        return before + tail if after.startswith(tail) else before

    def _render(self, formatter: Jinja2ChatFormatter, messages: Sequence[Message], options: TemplateOptions) -> str:
        """Return the chat as text, in the first form that the template does not refuse."""
        forms = self._forms_of(messages)
        try:
            return _format(formatter, next(forms), options)
        except JobRejected:
            for chat in forms:
                with suppress(JobRejected):
                    return _format(formatter, chat, options)
            raise

    def _forms_of(self, messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
        """Yield the chat, then with one system message and with arguments as texts, as some templates need it."""
        yield self._values_of(messages)
        one_system = with_one_system_message(messages)
        if one_system:
            yield self._values_of(one_system)
        if any(message.tool_calls for message in messages):
            yield _with_argument_texts(self._values_of(messages))
            if one_system:
                yield _with_argument_texts(self._values_of(one_system))

    def _values_of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages with the fields that the template reads, as llama.cpp does for gpt-oss."""
        chat = list(map(message_for_template, messages))
        for values in chat if self._reads_thinking else ():
            if reasoning := values.get("reasoning_content"):
                values["thinking"] = reasoning
                if self._refuses_both and values.get("tool_calls"):
                    del values["content"]
        return chat


def _with_argument_texts(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Change the arguments of calls to JSON texts, and an empty content beside them to None, and return the chat.

    Templates of DeepSeek join the arguments with texts, and print each content that is not None.
    """
    for values in chat:
        for call in values.get("tool_calls", ()):
            values["content"] = values.get("content") or None
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return chat


def _format(formatter: Jinja2ChatFormatter, messages: Any, options: TemplateOptions) -> str:
    try:
        tools = json.loads(options.tools)
        # Templates of firefunction concatenate a text of this name.
        functions = json.dumps(tools, indent=2) if tools else ""
        given = {"messages": messages, "tools": tools, "functions": functions, **json.loads(options.kwargs)}
        variables = default_variables(datetime.now()) | given  # noqa: DTZ005  # the model is told the local date
        return str(formatter(**variables).prompt)
    except Exception as exc:  # a template can raise any error; raise_exception() in it raises a ValueError
        raise JobRejected(ErrorCode.CHAT_TEMPLATE, f"the model's chat template refuses the chat: {exc}") from exc


def default_variables(now: datetime) -> dict[str, Any]:
    """Return the variables that llama.cpp gives to every template: the date in two forms, and that models reason."""
    return {
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y %H:%M:%S"),
        "enable_thinking": True,
    }
