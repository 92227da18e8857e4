"""The hint after an unknown option: if the option exists in another program, the option of this command with its
meaning.
"""

from __future__ import annotations

import re

from llamaq.common.protocol.job_request import JobParams
from llamaq.producer.option_synonyms import HINTS, SYNONYMS


def add_hint(error: Exception) -> None:
    """Complete the error for an unknown option of a command with job options. Other errors stay as they are.

    typer has the class of the error in a private module, so its attributes tell what it is.
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
