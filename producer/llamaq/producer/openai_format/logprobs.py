"""Reads which probabilities a request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.producer.openai_format.endpoints import Endpoint


def read_logprobs(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option `logprobs` of a job: the number of alternatives at each position.

    In a chat, the fields are `logprobs` and `top_logprobs`. In a completion, the field is the number `logprobs`. For
    llama-server's own endpoint, it is `n_probs`.

    Raises:
        InvalidRequest: A field is not a number or a boolean.
    """
    name_of_top = "top_logprobs" if "top_logprobs" in body else "n_probs"
    wanted, n_top = body.get("logprobs"), body.get(name_of_top)
    for name, value, types in ((name_of_top, n_top, (int,)), ("logprobs", wanted, (int, bool))):
        if value is not None and type(value) not in types:
            raise InvalidRequest(f"{name}: a number is required, not {str(value)[:50]!r}")
    if endpoint is Endpoint.COMPLETIONS and wanted is not None and not isinstance(wanted, bool):
        return {"logprobs": wanted}
    if wanted or (wanted is None and n_top):
        return {"logprobs": n_top or 0}
    return {}
