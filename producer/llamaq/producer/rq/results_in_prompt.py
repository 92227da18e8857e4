"""Inserts the results of other RQ jobs into a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.producer.rq.library import Job, NoSuchJobError, get_current_job


def insert_results(prompt: Any, insert: Mapping[str, str]) -> Any:
    """Return the prompt with the results of other RQ jobs in place of their placeholders.

    Args:
        prompt: A text, or any JSON value that contains texts, such as the messages of a chat.
        insert: The id of an RQ job, for each text that its result replaces.

    Raises:
        InvalidRequest: This function does not run in an RQ job, or a job has no result.
    """
    if not insert:
        return prompt
    texts = {place: result_text(job_id) for place, job_id in insert.items()}
    # One pass, longest text first: an inserted text is not searched again, and a longer text is replaced before a text
    # that is its beginning.
    pattern = re.compile("|".join(re.escape(place) for place in sorted(texts, key=len, reverse=True)))
    return _replace(prompt, lambda text: pattern.sub(lambda found: texts[found[0]], text))


def result_text(job_id: str) -> str:
    """Return the result of an RQ job as text: the text of a generation, a string as it is, other values as JSON.

    Raises:
        InvalidRequest: This function does not run in an RQ job, or the other job has no result.
    """
    current = get_current_job()
    if current is None:
        raise InvalidRequest("insert: only a function that an RQ worker runs can use the results of RQ jobs")
    try:
        other = Job.fetch(job_id, connection=current.connection, serializer=current.serializer)
        value = other.return_value()
    except NoSuchJobError:
        value = None
    if value is None:
        raise InvalidRequest(
            f"insert: RQ job {job_id} has no result. Name it in depends_on of this job, and let RQ keep its result "
            "until this job has run (result_ttl of the other job)"
        )
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return str(value["text"])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _replace(value: Any, replace: Any) -> Any:
    """Return a JSON value in which `replace` was applied to each text, except the keys of objects."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {key: _replace(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, replace) for item in value]
    return value
