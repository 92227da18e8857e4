"""The parts of an answer. A stream has several of each kind; joined in order, they are the whole answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text in which the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The model calls a tool. The arguments follow."""

    index: int
    """Number of the call in the answer, from 0 on."""
    name: str
    """Name of the function."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of a call, as JSON text."""

    index: int
    text: str


Part = Reasoning | Content | CallStarted | CallArguments
