"""Builds the chain of samplers that the parameters of a job ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import NamedTuple, TypeAlias

import numpy as np

from llamaq.common.protocol.sampler_names import Sampler
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidate_filters import (
    MAX_XTC_THRESHOLD,
    SORT_LIMIT,
    dynamic_temperature,
    exclude_top_choices,
    top_k,
    top_n_sigma,
    top_p_min_p,
    typical_p,
)
from llamaq.worker.generation.sampling.candidates import Candidates
from llamaq.worker.generation.sampling.dry import Dry
from llamaq.worker.generation.sampling.recent_tokens import RecentTokens
from llamaq.worker.generation.sampling.sequence_breakers import SequenceBreakers
from llamaq.worker.generation.sampling.top_k_draw import TopKDraw
from llamaq.worker.generation.sampling.uniform_numbers import XTC, UniformNumbers

GREEDY_BELOW = 1e-6
"""Temperatures below this value mean greedy decoding. Logits divided by such a temperature can exceed the range of
float32."""

PENALTIES: tuple[Sampler, ...] = ("penalties", "dry")
"""The samplers that only lower logits."""

Apply: TypeAlias = Callable[[Candidates, Sequence[int], int], Candidates]
"""A function of the candidates, the history and the position of the draw in the output."""


class Step(NamedTuple):
    """A sampler of a chain."""

    name: Sampler
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
    return params.mirostat > 0 or ("temperature" in params.samplers and not _penalizes_late(params))


def _penalizes_late(params: SamplingDefaults) -> bool:
    """Return whether a penalty comes after a sampler that removes candidates, or after the temperature."""
    is_active = {"penalties": _penalties(params) is not None, "dry": params.dry_multiplier > 0}
    late = dropwhile(PENALTIES.__contains__, params.samplers)
    return any(is_active.get(name, False) for name in late)


class SamplerChain:
    """The samplers of a job, as the steps of a draw.

    Attributes:
        penalties: The samplers that get all logits, also those of masked tokens.
        reduce: The first step after the penalties. It drops masked tokens if there are at most `SORT_LIMIT` candidates.
        filters: The steps after it.
        top_k_draw: Does the same as `reduce`, `filters` and a draw in less time. None: it does not support these
            samplers.
        n_largest: How many of the largest logits determine the draw. None: all logits.

    Args:
        params: The sampling parameters.
        uniform: The random numbers of the job.
        breakers: The sequence breakers of DRY.
        draw_accepts_masked: Whether the draw after the chain accepts masked candidates.
    """

    def __init__(
        self,
        params: SamplingDefaults,
        uniform: UniformNumbers,
        breakers: SequenceBreakers,
        *,
        draw_accepts_masked: bool,
    ) -> None:
        steps = _build_steps(params, uniform, breakers)
        n_penalties = next((index for index, step in enumerate(steps) if not step.is_penalty), len(steps))
        others = steps[n_penalties:]
        self.penalties = [step.apply for step in steps[:n_penalties]]
        self.n_largest = _n_largest_logits(steps, params)
        self.top_k_draw = _top_k_draw(others, params)
        if others and others[0].name == "top_k":
            self.reduce = others[0].apply
            joined = _count_masked(_join_top_p_min_p(others[1:], params), params)
            self.filters = [step.apply for step in joined]
        else:
            self.reduce = _drop_masked_of_few
            joined = _count_masked(_join_top_p_min_p(others, params), params)
            self.filters = _filters_without_masked(joined, draw_accepts_masked=draw_accepts_masked)


def _drop_masked_of_few(candidates: Candidates, _history: Sequence[int], _position: int) -> Candidates:
    """Drop masked candidates, if there are few candidates.

    Otherwise they stay, and the samplers give them the probability 0: copying a whole vocabulary takes longer than most
    samplers.
    """
    return candidates.without_masked() if len(candidates) <= SORT_LIMIT else candidates


def _build_steps(params: SamplingDefaults, uniform: UniformNumbers, breakers: SequenceBreakers) -> list[Step]:
    """Return the samplers that change something, in the order of the job.

    Mirostat replaces all samplers but the temperature, as in llama.cpp. Greedy decoding needs only the penalties.

    Args:
        params: The sampling parameters.
        uniform: The random numbers of the job.
        breakers: The sequence breakers of DRY.
    """
    order: Sequence[Sampler] = ("temperature",) if params.mirostat else params.samplers
    if is_greedy(params):
        order = [name for name in order if name in PENALTIES]
    makers: dict[Sampler, Callable[[], Apply | None]] = {
        "penalties": lambda: _penalties(params),
        "dry": lambda: _dry(params, breakers),
        "xtc": lambda: _xtc(params, uniform),
        "temperature": lambda: _temperature(params),
    }
    steps = [(name, makers[name]() if name in makers else _filter(name, params)) for name in order]
    accepting = {"top_k", "top_p", "min_p"} | ({"temperature"} if _has_fixed_temperature(params) else set())
    return [Step(name, apply, name in accepting) for name, apply in steps if apply is not None]


def _top_k_draw(chain: Sequence[Step], params: SamplingDefaults) -> TopKDraw | None:
    """Return the fast draw of a chain without penalties. None: it does not support the chain."""
    names = [step.name for step in chain]
    return TopKDraw(names, params, max(params.temperature, GREEDY_BELOW)) if TopKDraw.supports(names, params) else None


def _n_largest_logits(chain: Sequence[Step], params: SamplingDefaults) -> int | None:
    """Return how many of the largest logits determine what a chain draws.

    A penalty that lowers logits moves at most as many tokens out of the most probable ones as it changes. The same
    number of further logits replaces them.

    None: the chain needs all logits, because it does not begin with top-k, or because a penalty raises logits or has no
    bound on the number of logits that it changes.
    """
    windows = {"penalties": params.penalty_last_n, "dry": params.dry_penalty_last_n}
    n_penalized = [windows[step.name] for step in chain if step.is_penalty]
    raises_logits = params.repeat_penalty < 1 or params.frequency_penalty < 0 or params.presence_penalty < 0
    if n_penalized and (raises_logits or min(n_penalized) < 0):
        return None
    if is_greedy(params):
        return 1 + sum(n_penalized)
    first = next((step.name for step in chain if not step.is_penalty), None)
    return params.top_k + sum(n_penalized) if first == "top_k" else None


def _filter(name: Sampler, params: SamplingDefaults) -> Apply | None:
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


def _join_top_p_min_p(chain: Sequence[Step], params: SamplingDefaults) -> list[Step]:
    """Return the chain with one step in place of top-p followed by min-p, because one step takes less time than two."""
    joined: list[Step] = []
    for step in chain:
        if step.name == "min_p" and joined and joined[-1].name == "top_p":
            joined[-1] = Step(
                "min_p",
                lambda candidates, *_: top_p_min_p(candidates, params.top_p, params.min_p, params.min_keep),
                step.accepts_masked,
            )
        else:
            joined.append(step)
    return joined


class _MaskedCount:
    """The number of candidates that llama.cpp still has here, with the probability 0, and that this chain has dropped.

    In llama.cpp, top-n-sigma only masks candidates. The samplers after it drop them, unless fewer candidates are left
    than they keep. The dynamic temperature depends on the number of all candidates, also of the masked ones.
    """

    def __init__(self) -> None:
        self.n = 0

    def begun_by(self, first: Apply) -> Apply:
        """Return a step that begins the count of a draw."""

        def apply(candidates: Candidates, history: Sequence[int], position: int) -> Candidates:
            self.n = 0
            return first(candidates, history, position)

        return apply

    def raised_by(self, top_n_sigma: Apply) -> Apply:
        """Return a step that adds the candidates that it drops."""

        def apply(candidates: Candidates, history: Sequence[int], position: int) -> Candidates:
            kept = top_n_sigma(candidates, history, position)
            self.n += len(candidates) - len(kept)
            return kept

        return apply

    def lowered_by(self, step: Apply, n_least: int) -> Apply:
        """Return a step that subtracts what it drops in llama.cpp, where it keeps at least `n_least` candidates."""

        def apply(candidates: Candidates, history: Sequence[int], position: int) -> Candidates:
            kept = step(candidates, history, position)
            self.n = min(self.n, max(0, n_least - len(kept)))
            return kept

        return apply


NONE_MASKED = _MaskedCount()
"""The count of a chain in which nothing is counted: it stays 0."""


def _count_masked(chain: Sequence[Step], params: SamplingDefaults) -> Sequence[Step]:
    """Return the chain with steps that count masked candidates, if it has top-n-sigma and a dynamic temperature."""
    names = [step.name for step in chain]
    if _has_fixed_temperature(params) or "top_n_sigma" not in names or "temperature" not in names:
        return chain
    first, masked = names.index("top_n_sigma"), _MaskedCount()
    counting = [step._replace(apply=_counting(step, params, masked)) for step in chain[first:]]
    counting[0] = counting[0]._replace(apply=masked.begun_by(counting[0].apply))
    return [*chain[:first], *counting]


def _counting(step: Step, params: SamplingDefaults, masked: _MaskedCount) -> Apply:
    """Return a step that does the same, and changes or uses the count."""
    if step.name == "temperature":
        return _dynamic_temperature(params, masked)
    if step.name == "top_n_sigma":
        return masked.raised_by(step.apply)
    # Typical sampling of llama.cpp is not defined with masked candidates, because ln(0) is not.
    n_least = {"top_k": params.top_k, "typ_p": 0, "top_p": params.min_keep, "min_p": params.min_keep}
    return masked.lowered_by(step.apply, n_least[step.name]) if step.name in n_least else step.apply


def _filters_without_masked(chain: Sequence[Step], *, draw_accepts_masked: bool) -> list[Apply]:
    """Return the steps of a chain, with one more that drops masked candidates, if the chain needs it.

    It comes before the first step that does not accept masked candidates. Most chains do not need it. It copies the
    whole vocabulary if no candidate was dropped before.

    Args:
        chain: The samplers after the penalties. The first one is not top-k, which drops masked candidates too.
        draw_accepts_masked: Whether the draw after the chain accepts masked candidates too.
    """
    filters = [step.apply for step in chain]
    n_accepting = next((index for index, step in enumerate(chain) if not step.accepts_masked), len(chain))
    if n_accepting < len(chain) or not draw_accepts_masked:
        filters.insert(n_accepting, lambda candidates, *_: candidates.without_masked())
    return filters


def _has_fixed_temperature(params: SamplingDefaults) -> bool:
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


def _temperature(params: SamplingDefaults) -> Apply | None:
    if not _has_fixed_temperature(params):
        return _dynamic_temperature(params, NONE_MASKED)
    fixed = params.temperature
    if fixed == 1:
        return None

    return lambda candidates, *_: _divided(candidates, fixed)


def _dynamic_temperature(params: SamplingDefaults, masked: _MaskedCount) -> Apply:
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
