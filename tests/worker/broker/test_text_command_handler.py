"""The text commands of clients, with a chat template that writes what the arguments of a call contain."""

from __future__ import annotations

from pathlib import Path

from llamaq.common.protocol import codec
from llamaq.common.protocol.chat import FunctionCall, Message, ToolCall
from llamaq.common.protocol.text_commands import TextAction, TextCommand
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.broker.text_command_handler import TextCommandHandler
from llamaq.worker.engine.gguf_vocab import extract_vocab

TEMPLATE = "{% for message in messages %}{{ message.tool_calls[0].function.arguments.text }}{% endfor %}"


async def test_half_a_surrogate_pair_in_a_rendered_chat_becomes_a_question_mark(demo_model: Path) -> None:
    handler = TextCommandHandler(Vocab.from_blob(extract_vocab(demo_model, TEMPLATE)), context_limit=512)
    call = ToolCall(id="1", function=FunctionCall(name="f", arguments='{"text": "a \\ud83d b"}'))
    message = Message(role="assistant", content="", tool_calls=(call,))
    command = TextCommand(id="0" * 32, action=TextAction.APPLY_TEMPLATE, deadline_ms=1, messages=(message,))
    reply = await handler.execute(command)
    assert reply.text == "a ? b"
    assert codec.encode_model(reply)
