"""The events that a job publishes to its subscribers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.wire_model import WireModel


class Started(WireModel):
    """An attempt began. Later attempts announce themselves too; tokens go on where they were."""

    type: Literal["started"] = "started"
    attempt: int
    worker: str


class Tokens(WireModel):
    """Tokens from `offset` on, and the text that they completed, from character `text_offset` on.

    Text trails tokens: an incomplete UTF-8 character or the possible beginning of a stop string is held back.
    """

    type: Literal["tokens"] = "tokens"
    offset: int = Field(ge=0)
    tokens: tuple[int, ...]
    text_offset: int = Field(ge=0)
    text: str


class Finished(WireModel):
    """The job ended; its result lies in the job's hash."""

    type: Literal["finished"] = "finished"
    finish_reason: FinishReason
    stats: JobStats


class Failed(WireModel):
    """The job ended with an error of its own."""

    type: Literal["failed"] = "failed"
    code: str
    message: str


Event = Started | Tokens | Finished | Failed


EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])
