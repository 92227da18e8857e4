"""The options of a job as keyword arguments, for type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict

from llamaq.common.protocol.job_request import Priority


class JobOptions(TypedDict, total=False):
    """The fields of `JobParams` as keyword arguments, for type checkers.

    `JobParams` describes them. A test compares the names.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str] | tuple[str, ...]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    min_keep: int
    samplers: str | list[str] | tuple[str, ...]
    tools: Sequence[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    max_tokens: int | None
    min_tokens: int
    seed: int | None
    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | tuple[int, ...] | None
    bad_words: list[str] | tuple[str, ...]
    grammar: str | None
    grammar_root: str | None
    json_schema: dict[str, Any] | None
    regex: str | None
    choice: list[str] | tuple[str, ...] | None
    lark: str | None
    logprobs: int | None
    post_sampling_probs: bool
    prompt_logprobs: int | None
    reasoning_budget: int | None
    reasoning_open: str
    reasoning_close: str
    stop: str | list[str] | tuple[str, ...]
    include_stop: bool
    n_indent: int
    stop_token_ids: list[int] | tuple[int, ...]
    ignore_eos: bool
    special: bool
    cache_prompt: bool
    lora: Mapping[str, float] | Mapping[int, float] | None
    draft_max: int | None
    cache_salt: str
    cache_public: int | Literal["system"]
    slot: int | None
    timeout_s: float | None
    generation_timeout_s: float | None
    queue_timeout_s: float | None
    deadline_s: float | None
    delay_s: float | None
    run_at: datetime | float | str | None
    retries: int
    priority: Priority | Literal["interactive", "bulk"]
    tenant: str | None
    stream: bool
    prompt_progress: bool
    cancel_on_disconnect: bool
    idempotency_key: str | None
    traceparent: str | None
    metadata: dict[str, Any]
