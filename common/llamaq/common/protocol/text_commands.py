"""The commands that a client sends to one worker about texts, and the worker's reply.

With these commands, a client without llama.cpp gets the tokens, the rendered chats and the prompts with a gap that the
worker's model reads.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from llamaq.common.protocol.chat import Message, TemplateParams
from llamaq.common.protocol.job_request import MAX_MESSAGES
from llamaq.common.protocol.output_params import TokenId
from llamaq.common.protocol.slot_commands import COMMAND_ID_PATTERN
from llamaq.common.protocol.wire_model import WireModel


class TextAction(StrEnum):
    """The action of a text command."""

    TOKENIZE = "tokenize"
    """Return the tokens of a text, or of a chat."""
    DETOKENIZE = "detokenize"
    """Return the text of tokens."""
    APPLY_TEMPLATE = "apply_template"
    """Return a chat as text, rendered with the model's chat template."""
    INFILL = "infill"
    """Return the tokens of a prompt after which the model writes what belongs into a gap of a text."""


_INPUTS = {
    TextAction.TOKENIZE: ("text", "messages"),
    TextAction.DETOKENIZE: ("tokens",),
    TextAction.APPLY_TEMPLATE: ("messages",),
    TextAction.INFILL: ("infill",),
}
MAX_SNIPPETS = 1024


class Snippet(WireModel):
    """A text that the model reads before the text with the gap, such as a part of another file."""

    text: str = Field(description="The text.")
    filename: str = Field("tmp", description="The name of the file.")


class Infill(WireModel):
    """A text with a gap."""

    prefix: str = Field("", description="The text before the gap. Its end is used if it is too long.")
    suffix: str = Field("", description="The text after the gap. Its beginning is used if it is too long.")
    begun: str = Field("", description="The beginning of what belongs into the gap.")
    snippets: tuple[Snippet, ...] = Field(
        (), max_length=MAX_SNIPPETS, description="Other texts. The last ones are used if they are too long."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Largest number of tokens that the job will generate. Snippets leave room for them."
    )


class TextCommand(WireModel, TemplateParams):
    """One command to one worker."""

    id: str = Field(
        pattern=COMMAND_ID_PATTERN,
        description="Id of the command, 32 hexadecimal digits. The reply is written to `keys.reply(id)`.",
    )
    action: TextAction = Field(description="`tokenize`, `detokenize`, `apply_template` or `infill`.")
    text: str | None = Field(None, description="The text, for `tokenize`.")
    tokens: tuple[TokenId, ...] | None = Field(None, fail_fast=True, description="The token ids, for `detokenize`.")
    add_special: bool = Field(True, description="Whether `tokenize` adds BOS to a text if the model asks for it.")
    parse_special: bool = Field(
        True, description="Whether `tokenize` turns the texts of special tokens in a text into these tokens."
    )
    with_pieces: bool = Field(
        False, description="Whether the reply to `tokenize` or `detokenize` has the bytes of each token."
    )
    messages: tuple[Message, ...] | None = Field(
        None, max_length=MAX_MESSAGES, fail_fast=True, description="The chat, for `apply_template` and `tokenize`."
    )
    infill: Infill | None = Field(None, description="The text with the gap, for `infill`.")
    deadline_ms: int = Field(ge=0, description="As in a slot command.")

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        given = [name for name in ("text", "tokens", "messages", "infill") if getattr(self, name) is not None]
        allowed = _INPUTS[self.action]
        if len(given) != 1 or given[0] not in allowed:
            raise ValueError(f"{self.action.value} takes {' or '.join(allowed)}")
        return self


class TextReply(WireModel):
    """A worker's reply to a text command."""

    error: str | None = Field(None, description="Why the input was refused. None: the command succeeded.")
    tokens: tuple[int, ...] = Field((), description="The token ids, in the reply to `tokenize` and `infill`.")
    pieces: tuple[tuple[int, ...], ...] = Field(
        (), description="The bytes of each token, in the reply to a command with `with_pieces`."
    )
    parse_special: bool = Field(True, description="As in the command. Older workers know only true.")
    text: str = Field("", description="The text, in the reply to `detokenize` and `apply_template`.")
