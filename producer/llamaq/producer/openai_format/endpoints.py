"""The endpoints of the OpenAI API that generate text."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """An endpoint of the OpenAI API. The value is the path of its URL."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
