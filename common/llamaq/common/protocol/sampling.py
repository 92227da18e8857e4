"""The sampling parameters. Meaning and bounds are declared once, for the jobs and for the defaults of a worker.

Meanings, names and the default order of the samplers are those of llama.cpp.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode

from llamaq.common.protocol.sampler_names import DEFAULT_SAMPLERS, SamplerName, read_samplers
from llamaq.common.protocol.wire_model import StrictModel

MAX_TOKEN_ID = 2**31 - 1
MAX_SAMPLERS = 32
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 40
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


def _read_breakers(value: Any) -> Any:
    """Return the sequence breakers of a setting, whose text is a JSON list; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("a JSON list of texts is required") from None


_TEMPERATURE = Field(
    ge=0,
    le=100,
    description="Divides the logits: a higher value is more random. 0 always selects the most probable token.",
)
_TOP_K = Field(ge=0, le=MAX_TOKEN_ID, description="Keeps the k most probable tokens. 0 keeps all.")
_TOP_P = Field(
    gt=0,
    le=1,
    description="Keeps the smallest set of most probable tokens that reaches this total probability. 1 keeps all.",
)
_MIN_P = Field(
    ge=0,
    le=1,
    description="Drops tokens whose probability is below this share of the highest probability. 0 keeps all.",
)
_TYPICAL_P = Field(
    gt=0,
    le=1,
    description="Locally typical sampling: keeps the most typical tokens up to this total probability. 1 keeps all.",
)
_TOP_N_SIGMA = Field(
    ge=-1,
    le=1000,
    description="Keeps the tokens whose logit is at most this many standard deviations below the highest. 0 and -1 "
    "keep all.",
)
_XTC_PROBABILITY = Field(
    ge=0,
    le=1,
    description="XTC (exclude top choices): with this probability, all tokens above `xtc_threshold` are dropped, "
    "except the least probable of them. 0 turns it off.",
)
_XTC_THRESHOLD = Field(ge=0, le=1, description="Lowest probability of a top choice. Above 0.5 nothing is dropped.")
_DYNATEMP_RANGE = Field(
    ge=0,
    le=100,
    description="Dynamic temperature: the temperature depends on the entropy of the candidates, and is between "
    "`temperature` minus this range and `temperature` plus this range. 0 turns it off.",
)
_DYNATEMP_EXPONENT = Field(
    gt=0, le=100, description="Exponent of the normalized entropy, which determines the dynamic temperature."
)
_REPEAT_PENALTY = Field(
    ge=0.01,  # a logit that is divided by a much smaller number is infinite
    le=100,
    description="Lowers the logits of repeated tokens: positive logits are divided by this number, and negative logits "
    "are multiplied by it. 1 changes nothing.",
)
_FREQUENCY_PENALTY = Field(
    ge=-100, le=100, description="Subtracted from a token's logit for each of its occurrences. 0 changes nothing."
)
_PRESENCE_PENALTY = Field(
    ge=-100, le=100, description="Subtracted once from the logit of each token that occurred. 0 changes nothing."
)
_PENALTY_LAST_N = Field(
    ge=-1,
    le=MAX_TOKEN_ID,
    description="Number of the most recent tokens, of prompt and output together, that the three penalties count. "
    "-1 counts all, 0 turns the penalties off.",
)
_DRY_MULTIPLIER = Field(
    ge=0,
    le=100,
    description="DRY (do not repeat yourself): a token that would extend a repetition of n tokens is lowered by "
    "`dry_multiplier` * `dry_base` ** (n - `dry_allowed_length`). 0 turns it off.",
)
_DRY_BASE = Field(ge=1, le=100, description="DRY: factor of the penalty for each further token of a repetition.")
_DRY_ALLOWED_LENGTH = Field(
    ge=0, le=MAX_TOKEN_ID, description="DRY: repetitions of fewer tokens than this are not penalized."
)
_DRY_PENALTY_LAST_N = Field(
    ge=-1,
    le=MAX_TOKEN_ID,
    description="DRY: number of the most recent tokens, of prompt and output together, that are searched for "
    "repetitions. -1 searches all, 0 turns DRY off.",
)
_DRY_SEQUENCE_BREAKERS = Field(
    description="DRY: texts at which a repetition ends. At most 64 texts, each of at most 40 characters.",
)
_MIROSTAT = Field(
    ge=0,
    le=2,
    description="Mirostat, version 1 or 2: keeps the surprise of the drawn tokens near `mirostat_tau`. It replaces all "
    "samplers but the temperature. 0 turns it off.",
)
_MIROSTAT_TAU = Field(ge=0, le=100, description="Mirostat: the surprise to reach, in bits for each token.")
_MIROSTAT_ETA = Field(ge=0, le=10, description="Mirostat: learning rate.")
_ADAPTIVE_TARGET = Field(
    ge=-1,
    le=1,
    description="Adaptive-p: prefers tokens near this probability, so that the average over the drawn tokens reaches "
    "it. A negative number turns it off.",
)
_ADAPTIVE_DECAY = Field(
    ge=0, le=0.99, description="Adaptive-p: decay of the average, which covers about the last 1 / (1 - decay) tokens."
)
_MIN_KEEP = Field(
    ge=0,
    le=MAX_TOKEN_ID,
    description="Top-p, min-p, typical-p and XTC leave at least this many tokens. 0 and 1 set no bound.",
)
_SAMPLERS = Field(
    description="The samplers in the order in which they are applied. A sampler that is not named is not applied. The "
    "value is a list of names, a text of names with `;` between them, or a text of llama.cpp's letters, such as "
    "`edskypmxta`. `infill` (`i`) is only for completions within code: it keeps the few tokens that are most certain, "
    "and otherwise ends the text.",
)

Breakers = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)], ...],
    Field(max_length=MAX_BREAKERS, fail_fast=True),
]
Samplers = Annotated[tuple[SamplerName, ...], Field(max_length=MAX_SAMPLERS, fail_fast=True)]


class SamplingParams(StrictModel):
    """Parameters of the draw of the next token. None, the default of every field, selects the worker's default."""

    temperature: Annotated[float | None, _TEMPERATURE] = None
    top_k: Annotated[int | None, _TOP_K] = None
    top_p: Annotated[float | None, _TOP_P] = None
    min_p: Annotated[float | None, _MIN_P] = None
    typical_p: Annotated[float | None, _TYPICAL_P] = None
    top_n_sigma: Annotated[float | None, _TOP_N_SIGMA] = None
    xtc_probability: Annotated[float | None, _XTC_PROBABILITY] = None
    xtc_threshold: Annotated[float | None, _XTC_THRESHOLD] = None
    dynatemp_range: Annotated[float | None, _DYNATEMP_RANGE] = None
    dynatemp_exponent: Annotated[float | None, _DYNATEMP_EXPONENT] = None
    repeat_penalty: Annotated[float | None, _REPEAT_PENALTY] = None
    frequency_penalty: Annotated[float | None, _FREQUENCY_PENALTY] = None
    presence_penalty: Annotated[float | None, _PRESENCE_PENALTY] = None
    penalty_last_n: Annotated[int | None, _PENALTY_LAST_N] = None
    dry_multiplier: Annotated[float | None, _DRY_MULTIPLIER] = None
    dry_base: Annotated[float | None, _DRY_BASE] = None
    dry_allowed_length: Annotated[int | None, _DRY_ALLOWED_LENGTH] = None
    dry_penalty_last_n: Annotated[int | None, _DRY_PENALTY_LAST_N] = None
    dry_sequence_breakers: Annotated[Breakers | None, _DRY_SEQUENCE_BREAKERS] = None
    mirostat: Annotated[int | None, _MIROSTAT] = None
    mirostat_tau: Annotated[float | None, _MIROSTAT_TAU] = None
    mirostat_eta: Annotated[float | None, _MIROSTAT_ETA] = None
    adaptive_target: Annotated[float | None, _ADAPTIVE_TARGET] = None
    adaptive_decay: Annotated[float | None, _ADAPTIVE_DECAY] = None
    min_keep: Annotated[int | None, _MIN_KEEP] = None
    samplers: Annotated[Samplers | None, BeforeValidator(read_samplers), _SAMPLERS] = None


class SamplingDefaults(BaseModel):
    """Sampling defaults. A job may override each of them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    temperature: Annotated[float, _TEMPERATURE] = 0.8
    top_k: Annotated[int, _TOP_K] = 40
    top_p: Annotated[float, _TOP_P] = 0.95
    min_p: Annotated[float, _MIN_P] = 0.05
    typical_p: Annotated[float, _TYPICAL_P] = 1.0
    top_n_sigma: Annotated[float, _TOP_N_SIGMA] = 0.0
    xtc_probability: Annotated[float, _XTC_PROBABILITY] = 0.0
    xtc_threshold: Annotated[float, _XTC_THRESHOLD] = 0.1
    dynatemp_range: Annotated[float, _DYNATEMP_RANGE] = 0.0
    dynatemp_exponent: Annotated[float, _DYNATEMP_EXPONENT] = 1.0
    repeat_penalty: Annotated[float, _REPEAT_PENALTY] = 1.0
    frequency_penalty: Annotated[float, _FREQUENCY_PENALTY] = 0.0
    presence_penalty: Annotated[float, _PRESENCE_PENALTY] = 0.0
    penalty_last_n: Annotated[int, _PENALTY_LAST_N] = 64
    dry_multiplier: Annotated[float, _DRY_MULTIPLIER] = 0.0
    dry_base: Annotated[float, _DRY_BASE] = 1.75
    dry_allowed_length: Annotated[int, _DRY_ALLOWED_LENGTH] = 2
    dry_penalty_last_n: Annotated[int, _DRY_PENALTY_LAST_N] = 64
    dry_sequence_breakers: Annotated[Breakers, NoDecode, BeforeValidator(_read_breakers), _DRY_SEQUENCE_BREAKERS] = (
        DEFAULT_BREAKERS
    )
    mirostat: Annotated[int, _MIROSTAT] = 0
    mirostat_tau: Annotated[float, _MIROSTAT_TAU] = 5.0
    mirostat_eta: Annotated[float, _MIROSTAT_ETA] = 0.1
    adaptive_target: Annotated[float, _ADAPTIVE_TARGET] = -1.0
    adaptive_decay: Annotated[float, _ADAPTIVE_DECAY] = 0.9
    min_keep: Annotated[int, _MIN_KEEP] = 0
    samplers: Annotated[Samplers, NoDecode, BeforeValidator(read_samplers), _SAMPLERS] = DEFAULT_SAMPLERS

    def resolve(self, params: SamplingParams) -> SamplingDefaults:
        """Return these defaults, replaced by the values that the job itself sets."""
        given = {name: getattr(params, name) for name in params.model_fields_set & _SAMPLING_FIELDS}
        values = {name: value for name, value in given.items() if value is not None}
        return self.model_copy(update=values) if values else self


_SAMPLING_FIELDS = SamplingDefaults.model_fields.keys()
