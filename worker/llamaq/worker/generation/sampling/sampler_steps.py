"""The samplers that the parameters of a job ask for, as functions of the candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import NamedTuple

import numpy as np

from llamaq.common.protocol.sampler_names import SamplerName
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidate_filters import (
    MAX_XTC_THRESHOLD,
    dynamic_temperature,
    exclude_top_choices,
    top_k,
    top_n_sigma,
    top_p_min_p,
    typical_p,
)
from llamaq.worker.generation.sampling.candidates import Apply, Candidates
from llamaq.worker.generation.sampling.dry import Dry
from llamaq.worker.generation.sampling.infill_sampler import InfillTokens, infill
from llamaq.worker.generation.sampling.masked_count import NONE_MASKED, MaskedCount
from llamaq.worker.generation.sampling.recent_tokens import RecentTokens
from llamaq.worker.generation.sampling.sequence_breakers import SequenceBreakers
from llamaq.worker.generation.sampling.uniform_numbers import XTC, UniformNumbers

GREEDY_BELOW = 1e-6
"""Temperatures below this value mean greedy decoding. Logits divided by such a temperature can exceed the range of
float32."""

PENALTIES: tuple[SamplerName, ...] = ("penalties", "dry")
"""The samplers that only lower logits."""


class Step(NamedTuple):
    """A sampler of a chain."""

    name: SamplerName
    apply: Apply
    accepts_masked: bool = False
    """Whether the step treats a logit of minus infinity as a probability of 0."""

    @property
    def is_penalty(self) -> bool:
        """Whether the step only lowers logits."""
        return self.name in PENALTIES


def is_greedy(params: SamplingDefaults) -> bool:
    """Return whether every draw selects the most probable token, after the penalties with which the chain begins."""
    if params.temperature >= GREEDY_BELOW:
        return False
    if params.mirostat > 0:
        return True
    return "temperature" in params.samplers and "infill" not in params.samplers and not _penalizes_late(params)


def _penalizes_late(params: SamplingDefaults) -> bool:
    """Return whether a penalty comes after a sampler that removes candidates, or after the temperature."""
    is_active = {"penalties": _penalties(params) is not None, "dry": params.dry_multiplier > 0}
    late = dropwhile(PENALTIES.__contains__, params.samplers)
    return any(is_active.get(name, False) for name in late)


def build_steps(
    params: SamplingDefaults, uniform: UniformNumbers, breakers: SequenceBreakers, infill_tokens: InfillTokens | None
) -> list[Step]:
    """Return the samplers that change something, in the order of the job.

    Mirostat replaces all samplers but the temperature, as in llama.cpp. Greedy decoding needs only the penalties.

    Args:
        params: The sampling parameters.
        uniform: The random numbers of the job.
        breakers: The sequence breakers of DRY.
        infill_tokens: What the sampler `infill` needs. None: there is no such sampler.
    """
    order: Sequence[SamplerName] = ("temperature",) if params.mirostat else params.samplers
    if is_greedy(params):
        order = [name for name in order if name in PENALTIES]
    makers: dict[SamplerName, Callable[[], Apply | None]] = {
        "penalties": lambda: _penalties(params),
        "dry": lambda: _dry(params, breakers),
        "xtc": lambda: _xtc(params, uniform),
        "infill": lambda: None if infill_tokens is None else infill_step(infill_tokens, NONE_MASKED),
        "temperature": lambda: _temperature(params),
    }
    steps = [(name, makers[name]() if name in makers else _filter(name, params)) for name in order]
    accepting = {"top_k", "top_p", "min_p"} | ({"temperature"} if has_fixed_temperature(params) else set())
    return [Step(name, apply, name in accepting) for name, apply in steps if apply is not None]


def _filter(name: SamplerName, params: SamplingDefaults) -> Apply | None:
    """Return a sampler that depends on nothing but the candidates. None: it would change nothing."""
    min_keep = params.min_keep
    if name == "top_n_sigma" and params.top_n_sigma > 0:
        return lambda candidates, *_: top_n_sigma(candidates, params.top_n_sigma)
    if name == "top_k" and params.top_k > 0:
        return lambda candidates, *_: top_k(candidates, params.top_k)
    if name == "typ_p" and params.typical_p < 1:
        return lambda candidates, *_: typical_p(candidates, params.typical_p, min_keep)
    if name == "top_p" and params.top_p < 1:
        return lambda candidates, *_: top_p_min_p(candidates, params.top_p, 0, min_keep)
    if name == "min_p" and params.min_p > 0:
        return lambda candidates, *_: top_p_min_p(candidates, 1, params.min_p, min_keep)
    return None


def has_fixed_temperature(params: SamplingDefaults) -> bool:
    """Return whether the temperature does not depend on the candidates."""
    return params.dynatemp_range == 0 or params.mirostat > 0


def _penalties(params: SamplingDefaults) -> Apply | None:
    """Return the penalties for tokens that occur in the last `penalty_last_n` tokens of the history.

    new_logit_i = scaled_i - count_i * frequency_penalty - presence_penalty, where count_i is the number of occurrences
    of token i, and scaled_i is logit_i * repeat_penalty if logit_i <= 0, otherwise logit_i / repeat_penalty. Source:
    llama_sampler_penalties_apply.
    """
    given = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
    if params.penalty_last_n == 0 or given == (1, 0, 0):
        return None
    repeat, frequency, presence = map(np.float32, given)
    recent = RecentTokens(params.penalty_last_n)

    def apply(candidates: Candidates, history: Sequence[int], _position: int) -> Candidates:
        tokens, counts = recent.counts(history)
        given, own = candidates.find(tokens)
        logits = candidates.logits[own]
        scaled = np.where(logits <= 0, logits * repeat, logits / repeat)
        candidates.logits[own] = scaled - (counts[given] * frequency + presence)
        return candidates.with_logits(candidates.logits)

    return apply


def _dry(params: SamplingDefaults, breakers: SequenceBreakers) -> Apply | None:
    if params.dry_multiplier == 0 or params.dry_penalty_last_n == 0:
        return None
    dry = Dry(params, breakers)
    return lambda candidates, history, _position: dry.penalize(candidates, history)


def _xtc(params: SamplingDefaults, uniform: UniformNumbers) -> Apply | None:
    if params.xtc_probability == 0 or params.xtc_threshold > MAX_XTC_THRESHOLD:
        return None

    def apply(candidates: Candidates, _history: Sequence[int], position: int) -> Candidates:
        if uniform.at(position, XTC) >= params.xtc_probability:
            return candidates
        return exclude_top_choices(candidates, params.xtc_threshold, params.min_keep)

    return apply


def infill_step(tokens: InfillTokens, masked: MaskedCount) -> Apply:
    """Return the sampler `infill`, which depends on the number of candidates, masked ones included."""
    return lambda candidates, _history, position: infill(candidates, tokens, position, masked.n)


def _temperature(params: SamplingDefaults) -> Apply | None:
    if not has_fixed_temperature(params):
        return dynamic_temperature_step(params, NONE_MASKED)
    fixed = params.temperature
    if fixed == 1:
        return None

    return lambda candidates, *_: _divided(candidates, fixed)


def dynamic_temperature_step(params: SamplingDefaults, masked: MaskedCount) -> Apply:
    """Return the dynamic temperature, which depends on the number of candidates, masked ones included."""
    fixed, spread, exponent = params.temperature, params.dynatemp_range, params.dynatemp_exponent

    def apply(candidates: Candidates, _history: Sequence[int], _position: int) -> Candidates:
        return _divided(candidates, dynamic_temperature(candidates, fixed, spread, exponent, masked.n))

    return apply


def _divided(candidates: Candidates, temperature: float) -> Candidates:
    """Divide the logits by a temperature. If it means greedy decoding, return only the most probable candidate."""
    if temperature < GREEDY_BELOW:
        return candidates.take(np.array([candidates.logits.argmax()]))
    logits = candidates.logits / np.float32(temperature)
    return candidates.with_logits(logits, is_sorted=candidates.is_sorted)
