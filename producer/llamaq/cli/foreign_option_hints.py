"""Adds a hint to the error for an unknown option.

If the option exists in another program, the hint says what to use in this command instead.
"""

from __future__ import annotations

import re

from llamaq.common.protocol.job_request import JobParams
from llamaq.producer.option_synonyms import HINTS, SYNONYMS


def add_hint(error: Exception) -> None:
    """Add a hint to the error, if it is about an unknown option that other programs have. Other errors do not change.

    The class of the error is in a private module of typer. Therefore the error is recognized by its attributes.
    """
    written, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if written is None or context is None:
        return
    known = {parameter.name for parameter in context.command.params}
    name = written.lstrip("-").replace("-", "_")
    meant = SYNONYMS.get(name)
    if meant is not None and meant in known:
        error.possibilities = [_spelling(meant)]  # type: ignore[attr-defined]
    elif name in HINTS and "max_tokens" in known:
        fields = "|".join(JobParams.model_fields)
        hint = re.sub(rf"\b({fields})\b", lambda match: _spelling(match[1]), HINTS[name])
        error.message, error.possibilities = f"No such option: {written}; {hint}", None  # type: ignore[attr-defined]


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")
