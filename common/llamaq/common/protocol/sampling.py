"""The sampling parameters. Meaning and bounds are declared once, for the jobs and for the defaults of a worker.

Meaning and order follow llama.cpp's default sampler chain: logit bias, penalties, grammar, top-n-sigma, top-k,
typical-p, top-p, min-p, XTC, temperature.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from llamaq.common.protocol.wire_model import StrictModel

MAX_TOKEN_ID = 2**31 - 1

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
    description="Exclude top choices: probability that all tokens above `xtc_threshold` but the least probable of them "
    "are dropped. 0 turns it off.",
)
_XTC_THRESHOLD = Field(ge=0, le=1, description="Lowest probability of a top choice. Above 0.5 nothing is dropped.")
_DYNATEMP_RANGE = Field(
    ge=0,
    le=100,
    description="Dynamic temperature: between `temperature` minus and plus this range, by the entropy of the "
    "candidates. 0 turns it off.",
)
_DYNATEMP_EXPONENT = Field(
    gt=0, le=100, description="Exponent of the normalized entropy, which determines the dynamic temperature."
)
_REPEAT_PENALTY = Field(
    gt=0,
    le=100,
    description="Lowers the logits of repeated tokens: positive logits are divided by this number, negative logits "
    "multiplied. 1 changes nothing.",
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

    def resolve(self, params: SamplingParams) -> SamplingDefaults:
        """Return these defaults, replaced by the values that the job itself sets."""
        given = {name: getattr(params, name) for name in SamplingDefaults.model_fields}
        return self.model_copy(update={name: value for name, value in given.items() if value is not None})
