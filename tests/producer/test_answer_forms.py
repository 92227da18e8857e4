"""The form of an answer, for a queue whose workers come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamaq.common.errors import NoWorker
from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.text_commands import TextCommand, TextReply
from llamaq.common.vocab.chat_template import ChatTemplate
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.settings import serve_settings
from llamaq.producer.answer_forms import PROBE, AnswerForms
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerFormat

TEMPLATE = "<tool_call> <think></think>"
TOKENS = {"<tool_call>": 7}
CONNECTION: Any = SimpleNamespace(settings=SimpleNamespace(queue="q"))
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> QueueDirectory:
    directory = QueueDirectory(serve_settings(redis_url="redis://nowhere"))
    cards: list[Any] = [SimpleNamespace(chat_template=TEMPLATE, tag_tokens=TOKENS)]

    async def card(queue: str) -> Any:
        return cards.pop() if cards else None

    monkeypatch.setattr(directory, "card", card)
    return directory


async def test_the_last_template_is_kept_while_no_worker_lives(directory: QueueDirectory) -> None:
    cards = [await directory.last_card("q") for _ in range(3)]
    assert [card and card.chat_template for card in cards] == [TEMPLATE] * 3
    form = await AnswerForms(directory.last_card).of(CONNECTION, {"messages": HELLO, "tools": [{}]}, may_reason=False)
    assert form.tag_tokens == TOKENS


async def test_a_worker_is_asked_once_how_a_template_begins_an_answer(
    directory: QueueDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def ask(*_: Any, chat_template_kwargs: Any, **__: Any) -> TextReply:
        asked.append(chat_template_kwargs)
        if len(asked) == 1:
            raise NoWorker("q")
        return TextReply(text=f"<think> {PROBE} <think>\n" + ("" if chat_template_kwargs else "</think>"))

    monkeypatch.setattr("llamaq.producer.answer_forms.text_commands.ask", ask)
    forms = AnswerForms(directory.last_card)
    thinking = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}
    found = [await forms.of(CONNECTION, thinking) for _ in range(3)]
    assert [form.starts_in_reasoning for form in found] == [False, True, True]
    assert (await forms.of(CONNECTION, {"messages": HELLO})).has_reasoned
    assert len(asked) == 3


async def test_the_variables_of_a_template_are_not_kept(
    directory: QueueDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(*_: Any, **__: Any) -> TextReply:
        return TextReply(text=PROBE)

    monkeypatch.setattr("llamaq.producer.answer_forms.text_commands.ask", ask)
    forms = AnswerForms(directory.last_card)
    for text in ("a", "b"):
        await forms.of(CONNECTION, {"messages": HELLO, "chat_template_kwargs": {"text": text * 100_000}})
    assert len(forms._beginnings) == 2
    assert sum(len(part) for key in forms._beginnings for part in key) < 1000


async def test_what_the_request_constrains_is_no_reasoning(directory: QueueDirectory) -> None:
    forms = AnswerForms(directory.last_card)
    assert await forms.of(CONNECTION, {"messages": HELLO, "regex": "a"}) == CONTENT_ALONE
    called = await forms.of(CONNECTION, {"messages": HELLO, "lark": "start: A", "tools": [{}]})
    assert (called.format, called.has_tools, called.reasoning_open) == (AnswerFormat.HERMES, True, "")
    begun = [*HELLO, {"role": "assistant", "content": "<think>Well"}]
    for messages in (begun, [Message(role="user", content="Hi"), Message(role="assistant", content="<think>Well")]):
        assert (await forms.of(CONNECTION, {"messages": messages, "continue_final_message": True})).starts_in_reasoning


CUT = {"role": "assistant", "content": "", "reasoning_content": "Is it </think>? "}


@pytest.mark.parametrize("last", [CUT, {**CUT, "content": None}, Message.model_validate({**CUT, "content": "\n"})])
async def test_an_answer_that_was_cut_inside_its_reasoning_begins_there(directory: QueueDirectory, last: Any) -> None:
    forms = AnswerForms(directory.last_card)
    job = {"messages": [*HELLO, last], "continue_final_message": True}
    form = await forms.of(CONNECTION, job)
    assert (form.starts_in_reasoning, form.has_reasoned) == (True, False)
    shown = await forms.of(CONNECTION, job, may_reason=False)
    assert not shown.starts_in_reasoning
    answered = {**job, "messages": [*HELLO, {**dict(last), "content": "Yes"}]}
    assert not (await forms.of(CONNECTION, answered)).starts_in_reasoning


NEMOTRON = """{% set ns = namespace(thinks=true) %}{% for message in messages -%}
{% if message.role in ('user', 'system') and '/think' in message.content %}{% set ns.thinks = true -%}
{% elif message.role in ('user', 'system') and '/no_think' in message.content %}{% set ns.thinks = false %}{% endif -%}
[{{ message.role }}]{{ message.content.replace('/no_think', '').strip() }}{% endfor -%}
{% if add_generation_prompt %}[assistant]{{ '<think>\n' if ns.thinks else '<think></think>' }}{% endif %}"""
"""A template that looks for a switch in the messages, as that of Nemotron Nano v2 does."""
DEEPSEEK = """{% set ns = namespace(is_tool=false) %}{% for message in messages -%}
{% set ns.is_tool = message.role == 'tool' %}[{{ message.role }}]{{ message.content }}{% endfor -%}
{% if add_generation_prompt and not ns.is_tool %}[assistant]<think>\n{% endif %}{# </think> #}"""
"""A template that does not begin the reasoning after the result of a tool, as that of DeepSeek R1 does."""
QWEN = """{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]<think>
{# </think> #}"""
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "<think> 20 </think>", "tool_call_id": "c"}
QUOTE = {"role": "user", "content": "What is <think>?"}
CLOSED, OPENED, NEITHER = (False, True), (True, False), (False, False)


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


@pytest.mark.parametrize(
    ("template", "chats", "n_asked"),
    [
        (NEMOTRON, [(HELLO, OPENED), ([system("Be kind."), QUOTE], OPENED)], 2),
        (NEMOTRON, [([system("/no_think"), QUOTE], CLOSED), ([*HELLO, CALL, RESULT, system("/no_think")], CLOSED)], 2),
        (NEMOTRON, [([system("/no_think"), {"role": "user", "content": "Hi /think"}], OPENED)], 1),
        (DEEPSEEK, [(HELLO, OPENED), ([QUOTE, CALL, RESULT], NEITHER), ([*HELLO, CALL, RESULT, *HELLO], OPENED)], 3),
        (DEEPSEEK, [(HELLO, OPENED), ([QUOTE], OPENED)], 1),
        (QWEN, [(HELLO, OPENED), ([QUOTE, CALL, RESULT], OPENED), ([system("/no_think"), *HELLO], OPENED)], 1),
    ],
)
@pytest.mark.parametrize("has_objects", [False, True])
async def test_a_template_that_reads_the_messages_is_asked_with_those_of_the_chat(
    monkeypatch: pytest.MonkeyPatch, template: str, chats: Any, n_asked: int, has_objects: bool
) -> None:
    asked: list[TextCommand] = []

    async def exchange(_: Any, command: TextCommand, __: float) -> TextReply:
        asked.append(command)
        rendered = ChatTemplate(template, eos="", bos="").render(command.messages or (), command.template_options)
        return TextReply(text=rendered)

    async def card(_: str) -> Any:
        return SimpleNamespace(chat_template=template, tag_tokens={})

    monkeypatch.setattr("llamaq.producer.answer_forms.text_commands._exchange_with_any", exchange)
    settings = SimpleNamespace(queue="q", max_request_bytes=10_000)
    connection: Any = SimpleNamespace(settings=settings, timeout_s=lambda timeout_s: timeout_s)
    forms, tools = AnswerForms(card), [{"type": "function", "function": {"name": "now"}}]
    for chat, expected in chats:
        messages = [Message.model_validate(each) for each in chat] if has_objects else chat
        form = await forms.of(connection, {"messages": messages, "tools": tools})
        assert (form.starts_in_reasoning, form.has_reasoned) == expected, chat
    assert len(asked) == n_asked
    for command in asked:
        is_probe = [(each.role, each.content) for each in command.messages or ()] == [("user", PROBE)]
        assert command.tools == (None if is_probe else tuple(tools))


@pytest.mark.parametrize(
    "messages", [["tool"], [*HELLO, 5, "tool"], "tool", [{"role": "tool", "content": "x" * 10_000}]]
)
async def test_for_messages_that_are_refused_the_form_is_no_error(messages: Any) -> None:
    async def card(_: str) -> Any:
        return SimpleNamespace(chat_template=DEEPSEEK, tag_tokens={})

    settings = SimpleNamespace(queue="q", max_request_bytes=10_000)
    form = await AnswerForms(card).of(SimpleNamespace(settings=settings), {"messages": messages})  # type: ignore[arg-type]
    assert (form.starts_in_reasoning, form.has_reasoned) == NEITHER
