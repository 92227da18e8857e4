"""The sampling parameters that the model's file recommends, as defaults of jobs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from llamaq.common.protocol.job_request import JobDefaults
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

PREFIX = "general.sampling."
FIELDS: Mapping[str, str] = {
    "sequence": "samplers",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temperature",
    "penalty_last_n": "penalty_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
"""For each key of the file that llama.cpp reads: our parameter."""


def job_defaults_for_model(settings: WorkerSettings, read: Callable[[str], str | None]) -> JobDefaults:
    """Return the defaults of jobs: the settings of the user, then those of the model's file, then those of llamaq.

    Args:
        settings: The settings of the worker.
        read: Returns the text of a key of the file's metadata, or None.
    """
    defaults = settings.job_defaults
    if not settings.model_sampling:
        return defaults
    found: dict[str, Any] = {}
    for key, field in FIELDS.items():
        text = None if field in settings.model_fields_set else read(PREFIX + key)
        if text is None:
            continue
        try:
            found[field] = getattr(JobDefaults.model_validate({field: _as_ours(field, text)}), field)
        except ValidationError:
            log.warning("model.bad_sampling key=%s%s value=%r: not used, because it is not valid", PREFIX, key, text)
    if found:
        log.info("model.sampling %s", " ".join(f"{name}={value}" for name, value in found.items()))
    return defaults.model_copy(update=found)


def _as_ours(field: str, text: str) -> str:
    """Return the value of our parameter for a text of the file. In llama.cpp, `top_k` below 0 keeps all tokens."""
    return "0" if field == "top_k" and re.fullmatch(r"-\d+", text) else text
