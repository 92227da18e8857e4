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
    wanted, n_top = body.get("logprobs"), body.get("top_logprobs", body.get("n_probs"))
    for name, value in (("top_logprobs", n_top), ("logprobs", wanted)):
        if value is not None and not isinstance(value, int):
            raise InvalidRequest(f"{name}: a number is required, not {str(value)[:50]!r}")
    if endpoint is Endpoint.COMPLETIONS and wanted is not None and not isinstance(wanted, bool):
        return {"logprobs": wanted}
    if wanted or (wanted is None and n_top):
        return {"logprobs": n_top or 0}
    return {}
