from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from llamaq.common.errors import InvalidRequest, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.chat import Message, TemplateOptions, message_for_template
from llamaq.common.vocab.chat_template import ChatTemplate
from llamaq.common.vocab.llama_vocab import Vocab

TEMPLATE = """{% for message in messages -%}
[{{ message.role }}]{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>
{%- endfor %}{% endfor -%}
{% if tools %}[tools]{{ tools | tojson }}{% endif -%}
{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def request(**values: Any) -> TemplateOptions:
    return codec.build_request({"messages": [{"role": "user", "content": "hi"}], **values}).template_options


def render(messages: list[Message], options: TemplateOptions) -> str:
    return ChatTemplate(TEMPLATE, eos="</s>", bos="<s>").render(messages, options)


USER = Message(role="user", content=" hi ")


def calling(name: str, arguments: Any = "{}", call_id: str | None = None, **values: Any) -> Message:
    """Return a message of the assistant that calls a function."""
    calls = [{"id": call_id, "function": {"name": name, "arguments": arguments}}]
    return Message.model_validate({"role": "assistant", "tool_calls": calls, **values})


def test_a_template_gets_tools_and_further_variables() -> None:
    options = request(tools=[WEATHER], chat_template_kwargs={"mood": "glad"})
    rendered = render([USER], options)
    assert rendered.startswith("[user]hi[tools]")
    assert '"name": "weather"' in rendered
    assert rendered.endswith("[assistant]glad")


def test_the_beginning_of_the_answer_may_be_left_out() -> None:
    assert render([USER], request(add_generation_prompt=False)) == "[user]hi"


@pytest.mark.parametrize(
    ("content", "end"), [("It is", "It is"), (" It is ", "It is"), ("It is [user]", "It is [user]")]
)
def test_the_last_message_is_continued(content: str, end: str) -> None:
    messages = [USER, Message(role="assistant", content=content)]
    assert render(messages, request(continue_final_message=True)) == f"[user]hi[assistant]{end}"


CONTENTS_LIKE_TAGS = ["<", "|", "<|", "i", "im", "end", "e", "  <", "| ", "user", "a <"]


@pytest.mark.parametrize("content", CONTENTS_LIKE_TAGS)
def test_a_content_that_is_a_part_of_the_text_after_it_is_continued(chat_vocab: Vocab, content: str) -> None:
    messages = [Message(role="user", content="hi"), Message(role="assistant", content=content)]
    options = request(continue_final_message=True)
    rendered = chat_vocab.render_chat(messages, options)
    assert rendered.endswith(f"<|im_start|>assistant\n{content}")
    tokens = chat_vocab.encode_chat(messages, options)
    assert b"".join(map(chat_vocab.piece_with_special, tokens)).decode().endswith(rendered)


def test_a_content_that_the_template_changes_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[-1].content.split('</think>')[-1] }}", eos="", bos="")
    with pytest.raises(JobRejected, match="does not contain the content"):
        template.render([Message(role="assistant", content="why</think>so")], request(continue_final_message=True))


def test_a_message_without_content_cannot_be_continued() -> None:
    with pytest.raises(JobRejected, match="continue_final_message"):
        render([Message(role="assistant", content=" ")], request(continue_final_message=True))


THINK = """{% for message in messages %}[{{ message.role }}]{% if message.reasoning_content -%}
<think>{{ message.reasoning_content.strip('\n') }}</think>{% endif %}{{ message.content }}.{% endfor %}"""


@pytest.mark.parametrize(
    ("content", "reasoning", "end"),
    [
        ("", "Let me", "<think>Let me"), (" \n", "\nLet me </think> ", "<think>Let me </think> "),
        ("So", "Let me", "<think>Let me</think>So"),
    ],
)  # fmt: skip
def test_an_answer_that_was_cut_inside_its_reasoning_is_continued_there(content: str, reasoning: str, end: str) -> None:
    messages = [USER, Message(role="assistant", content=content, reasoning_content=reasoning)]
    template = ChatTemplate(THINK, eos="", bos="")
    assert template.render(messages, request(continue_final_message=True)) == f"[user] hi .[assistant]{end}"


@pytest.mark.parametrize(("template", "reasoning"), [(TEMPLATE, "Let me"), (THINK, " \n")])
def test_reasoning_that_the_template_does_not_show_cannot_be_continued(template: str, reasoning: str) -> None:
    message = Message(role="assistant", content="", reasoning_content=reasoning)
    with pytest.raises(JobRejected, match="does not contain the reasoning_content of the last message"):
        ChatTemplate(template, eos="", bos="").render([message], request(continue_final_message=True))


@pytest.mark.parametrize("arguments", [{"city": "Ulm"}, '{"city": "Ulm"}'])
def test_a_template_gets_the_arguments_of_a_call_as_an_object(arguments: Any) -> None:
    call = {"id": "c1", "function": {"name": "weather", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert render([message], request(add_generation_prompt=False)) == '[assistant]<call>weather{"city": "Ulm"}</call>'


def test_arguments_that_are_no_object_stay_a_text() -> None:
    call = {"function": {"name": "weather", "arguments": "[1"}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message_for_template(message)["tool_calls"][0]["function"]["arguments"] == "[1"


@pytest.mark.parametrize("arguments", ["", " \n", "null", "{}"])
def test_the_arguments_of_a_call_without_arguments_are_an_empty_object(arguments: str) -> None:
    """Some servers send such texts. The template of Qwen3-Coder iterates over the arguments."""
    template = "{% for name, value in messages[0].tool_calls[0].function.arguments|items %}{{ name }}{% endfor %}none"
    assert ChatTemplate(template, eos="", bos="").render([calling("now", arguments)], request()) == "none"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: tools cannot be set"),
        ({"messages": None, "prompt": "x", "tools": [WEATHER]}, "tools: only for a chat"),
        ({"messages": [{"role": "assistant"}]}, "content: a text is required"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "arguments"),
    ],
)
def test_wrong_template_parameters_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        request(**values)


def test_an_unknown_field_of_a_message_is_refused() -> None:
    with pytest.raises(ValidationError):
        Message.model_validate({"role": "user", "content": "x", "audio": 1})


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (Message(role="tool", content="x", tool_call_id="<|im_end|>"), TemplateOptions()),
        (calling("weather", call_id="<|im_start|>"), TemplateOptions()),
        (calling("<|im_start|>"), TemplateOptions()),
        (USER, request(tools=[{"type": "function", "function": {"name": "<|im_end|>"}}])),
        (USER, request(chat_template_kwargs={"a": {"<|im_end|>": 1}})),
    ],
)
def test_a_special_token_in_an_id_a_name_or_an_option_is_refused(
    chat_vocab: Vocab, message: Message, options: TemplateOptions
) -> None:
    with pytest.raises(JobRejected, match="contains the text of a special token"):
        chat_vocab.encode_chat([message], options)


def test_the_tokens_of_a_chat_follow_the_options(chat_vocab: Vocab) -> None:
    messages = [Message(role="user", content="hi"), Message(role="assistant", content="I am")]
    options = request(continue_final_message=True)
    tokens = chat_vocab.encode_chat(messages, options)
    assert tokens == chat_vocab.encode(chat_vocab.render_chat(messages, options))
    assert chat_vocab.decode(tokens).endswith("I am")
    assert len(chat_vocab.encode_chat(messages, request(add_generation_prompt=False))) < len(
        chat_vocab.encode_chat(messages)
    )


def test_templates_have_the_variables_of_llama_cpp() -> None:
    text = "{{ date_string }}|{{ datetime }}|{{ enable_thinking }}|{{ functions + '!' }}"
    template = ChatTemplate(text, eos="", bos="")
    user = [Message(role="user", content="x")]
    date, now, thinking, functions = template.render(user, TemplateOptions()).split("|")
    told = [datetime.strptime(date, "%d %b %Y"), datetime.strptime(now, "%b %d %Y %H:%M:%S")]  # noqa: DTZ007
    assert all(abs((datetime.now(UTC) - each.replace(tzinfo=UTC)).days) <= 2 for each in told)
    assert (thinking, functions) == ("True", "!")
    chosen = TemplateOptions(tools='[{"a": 1}]', kwargs='{"enable_thinking": false, "date_string": "today"}')
    date, _, thinking, functions = template.render(user, chosen).split("|")
    assert (date, thinking, functions) == ("today", "False", '[\n  {\n    "a": 1\n  }\n]!')


ONE_SYSTEM_MESSAGE = """{% for message in messages -%}
{% if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}
{%- endif %}[{{ message.role }}]{{ message.content }}{% endfor %}"""
"""A template that refuses system messages as those of Qwen 3.5 and later do."""


def chat(*roles: str) -> list[Message]:
    return [Message(role=role, content=str(number)) for number, role in enumerate(roles)]


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


@pytest.mark.parametrize(
    ("roles", "rendered"),
    [
        (["system", "system", "user"], "[system]0\n\n1[user]2"),
        (["system", "user", "system"], f"[system]0[user]1\n\n{reminder('2')}"),
        (["user", "system", "user"], f"[user]0\n\n{reminder('1')}\n\n2"),
        (["user", "tool", "system", "assistant"], f"[user]0[tool]1[user]{reminder('2')}[assistant]3"),
        (["user", "system", "system"], f"[user]0\n\n{reminder('1')}\n\n{reminder('2')}"),
        (["user", "assistant", "user", "user"], "[user]0[assistant]1[user]2[user]3"),
    ],
)
def test_a_template_that_accepts_one_system_message_gets_one(roles: list[str], rendered: str) -> None:
    """Codex sends messages of the developer after its instructions, and Claude Code sends later system messages."""
    template = ChatTemplate(ONE_SYSTEM_MESSAGE, eos="</s>", bos="<s>")
    assert template.render(chat(*roles), request()) == rendered


def test_a_template_that_accepts_several_system_messages_gets_them_unchanged() -> None:
    assert render(chat("system", "user", "system"), request(add_generation_prompt=False)) == "[system]0[user]1[system]2"


def test_a_template_that_refuses_the_chat_for_another_reason_says_this_reason() -> None:
    template = ChatTemplate("{{ raise_exception('no ' ~ messages | length) }}", eos="</s>", bos="<s>")
    with pytest.raises(JobRejected, match="no 3"):
        template.render(chat("system", "system", "user"), request())


GPT_OSS = """{% for message in messages %}{% if message.role == 'assistant' -%}
{% if 'content' in message and '<|channel|>' in message.content %}{{ raise_exception('a tag') }}{% endif -%}
{% if 'tool_calls' in message -%}
{% if message.content and message.thinking -%}
{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
{%- elif message.content %}[analysis]{{ message.content -}}
{% elif message.thinking %}[analysis]{{ message.thinking }}{% endif -%}
[call]{{ message.tool_calls[0].function.name -}}
{% else -%}
{% if loop.last and not add_generation_prompt and 'thinking' in message %}[analysis]{{ message.thinking }}{% endif -%}
[final]{{ message.content }}{% endif -%}
{% else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"""
"""A template that reads reasoning as that of gpt-oss does."""
LFM = """{% for message in messages -%}
{% if message.thinking is defined %}<think>{{ message.thinking }}</think>{% endif %}{{ message.content -}}
{% if message.tool_calls is defined %}[call]{% endif %}{% endfor %}"""
"""A template that reads reasoning as that of LFM2.5 does."""
BOTH_NAMES = "{{ messages[0].thinking is defined }} {{ messages[0].reasoning_content }}"
RESULT = Message(role="tool", content="20")


@pytest.mark.parametrize(
    ("template", "content", "rendered"),
    [
        (GPT_OSS, "", "[analysis]why[call]weather[tool]20"),
        (GPT_OSS, "I look.", "[analysis]why[call]weather[tool]20"),
        (LFM, "I look.", "<think>why</think>I look.[call]20"),
        ("{{ messages[0]['thinking'] }}", "I look.", "why"),
        (BOTH_NAMES, "I look.", "False why"),
    ],
)
def test_a_template_gets_the_reasoning_by_the_name_that_it_reads(template: str, content: str, rendered: str) -> None:
    messages = [calling("weather", content=content, reasoning_content="why"), RESULT]
    assert ChatTemplate(template, eos="", bos="").render(messages, request()) == rendered
    assert "thinking" not in message_for_template(messages[0])


@pytest.mark.parametrize(
    ("content", "reasoning", "rendered"),
    [
        ("Hi", None, "[final]Hi"),
        ("Hi", "", "[final]Hi"),
        ("Hi", "why", "[analysis]why[final]Hi"),
        ("", "why", "[analysis]why"),
    ],
)
def test_an_answer_of_gpt_oss_is_continued_where_it_was_cut(content: str, reasoning: str | None, rendered: str) -> None:
    message = Message(role="assistant", content=content, reasoning_content=reasoning)
    template = ChatTemplate(GPT_OSS, eos="", bos="")
    assert template.render([message], request(continue_final_message=True)) == rendered


DEEPSEEK = """{% for message in messages -%}
{% if message['role'] == 'system' and not loop.first and strict %}{{ raise_exception('system') }}{% endif -%}
{% for tool in message['tool_calls'] -%}
{{ '[call]' + tool['function']['name'] + '[sep]' + tool['function']['arguments'] + '[end]' -}}
{% endfor -%}
{% if message['content'] is not none %}{{ '[' + message['role'] + ']' + message['content'] }}{% endif %}{% endfor %}"""
"""A template that joins the arguments of calls with texts, as those of DeepSeek R1 and V3.1 do."""


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city":"K\\u00f6ln"}'])
@pytest.mark.parametrize(
    ("before", "kwargs", "rendered"),
    [
        (["user"], {}, "[user]0"),
        (["system", "user", "system"], {}, "[system]0[user]1[system]2"),
        (["system", "system"], {"strict": True}, "[system]0\n\n1"),
    ],
)
def test_a_template_that_joins_arguments_with_texts_gets_them_as_json(
    before: list[str], kwargs: dict[str, Any], rendered: str, arguments: Any
) -> None:
    messages = [*chat(*before), calling("weather", arguments), RESULT, calling("now", content="Well")]
    called = '[call]weather[sep]{"city": "Köln"}[end][tool]20[call]now[sep]{}[end][assistant]Well'
    template = ChatTemplate(DEEPSEEK, eos="", bos="")
    assert template.render(messages, request(chat_template_kwargs=kwargs)) == rendered + called


def test_a_template_that_accepts_objects_gets_the_chat_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(TEMPLATE, eos="", bos="")
    rendered = Mock(side_effect=template._without_prompt)
    monkeypatch.setattr(template, "_without_prompt", rendered)
    template.render([calling("weather", {"city": "Ulm"}), RESULT], request(add_generation_prompt=False))
    rendered.assert_called_once()


def test_a_template_that_refuses_a_chat_with_calls_in_each_form_says_its_first_reason() -> None:
    template = ChatTemplate("{{ raise_exception(messages[0].content is none) }}", eos="", bos="")
    with pytest.raises(JobRejected, match="False"):
        template.render([calling("weather")], request())
