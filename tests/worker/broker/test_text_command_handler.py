"""The text commands of clients, with a chat template that writes what the arguments of a call contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaq.common.protocol import codec
from llamaq.common.protocol.chat import FunctionCall, Message, ToolCall
from llamaq.common.protocol.text_commands import TextAction, TextCommand
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.broker.text_command_handler import TextCommandHandler
from llamaq.worker.engine.gguf_vocab import extract_vocab

TEMPLATE = "{% for message in messages %}{{ message.tool_calls[0].function.arguments.text }}{% endfor %}"


@pytest.mark.parametrize("ends_texts", [False, True])
@pytest.mark.parametrize("add_special", [False, True])
async def test_the_texts_of_special_tokens_stay_text_without_parse_special(
    demo_model: Path, *, ends_texts: bool, add_special: bool
) -> None:
    vocab = Vocab.from_blob(extract_vocab(demo_model))
    handler = TextCommandHandler(vocab, context_limit=512, ends_texts=ends_texts)

    async def tokens_of(text: str, *, parse_special: bool) -> list[int]:
        command = TextCommand(
            id="0" * 32,
            action=TextAction.TOKENIZE,
            deadline_ms=1,
            text=text,
            add_special=add_special,
            parse_special=parse_special,
        )
        reply = await handler.execute(command)
        assert reply.parse_special is parse_special
        return list(reply.tokens)

    for text in ("Once upon a time", " a", "", "é\n"):
        assert await tokens_of(text, parse_special=False) == await tokens_of(text, parse_special=True)
    assert vocab.bos is not None
    special = vocab.piece_with_special(vocab.bos).decode()
    empty = await tokens_of("", parse_special=False)
    for text in (special, f"a{special}b"):
        plain = await tokens_of(text, parse_special=False)
        assert plain.count(vocab.bos) == empty.count(vocab.bos)
        assert vocab.decode(plain).strip() == text
        assert (await tokens_of(text, parse_special=True)).count(vocab.bos) >= 1


async def test_half_a_surrogate_pair_in_a_rendered_chat_becomes_a_question_mark(demo_model: Path) -> None:
    handler = TextCommandHandler(Vocab.from_blob(extract_vocab(demo_model, TEMPLATE)), context_limit=512)
    call = ToolCall(id="1", function=FunctionCall(name="f", arguments='{"text": "a \\ud83d b"}'))
    message = Message(role="assistant", content="", tool_calls=(call,))
    command = TextCommand(id="0" * 32, action=TextAction.APPLY_TEMPLATE, deadline_ms=1, messages=(message,))
    reply = await handler.execute(command)
    assert reply.text == "a ? b"
    assert codec.encode_model(reply)
