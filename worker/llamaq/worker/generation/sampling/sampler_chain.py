"""Arranges the samplers of a job as a chain, in which as few steps as possible handle the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidate_filters import SORT_LIMIT, top_p_min_p
from llamaq.worker.generation.sampling.candidates import Apply, Candidates
from llamaq.worker.generation.sampling.infill_sampler import InfillTokens
from llamaq.worker.generation.sampling.masked_count import MaskedCount
from llamaq.worker.generation.sampling.sampler_steps import (
    GREEDY_BELOW,
    Step,
    build_steps,
    dynamic_temperature_step,
    has_fixed_temperature,
    infill_step,
    is_greedy,
)
from llamaq.worker.generation.sampling.sequence_breakers import SequenceBreakers
from llamaq.worker.generation.sampling.top_k_draw import TopKDraw
from llamaq.worker.generation.sampling.uniform_numbers import UniformNumbers


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
        infill_tokens: What the sampler `infill` needs. None: the chain has no such sampler.
    """

    def __init__(
        self,
        params: SamplingDefaults,
        uniform: UniformNumbers,
        breakers: SequenceBreakers,
        *,
        draw_accepts_masked: bool,
        infill_tokens: InfillTokens | None = None,
    ) -> None:
        steps = build_steps(params, uniform, breakers, infill_tokens)
        n_penalties = next((index for index, step in enumerate(steps) if not step.is_penalty), len(steps))
        others = steps[n_penalties:]
        self.penalties = [step.apply for step in steps[:n_penalties]]
        self.n_largest = _n_largest_logits(steps, params)
        self.top_k_draw = _top_k_draw(others, params)
        if others and others[0].name == "top_k":
            self.reduce = others[0].apply
            joined = _count_masked(_join_top_p_min_p(others[1:], params), params, infill_tokens)
            self.filters = [step.apply for step in joined]
        else:
            self.reduce = _drop_masked_of_few
            joined = _count_masked(_join_top_p_min_p(others, params), params, infill_tokens)
            self.filters = _filters_without_masked(joined, draw_accepts_masked=draw_accepts_masked)


def _drop_masked_of_few(candidates: Candidates, _history: Sequence[int], _position: int) -> Candidates:
    """Drop masked candidates, if there are few candidates.

    Otherwise they stay, and the samplers give them the probability 0: copying a whole vocabulary takes longer than most
    samplers.
    """
    return candidates.without_masked() if len(candidates) <= SORT_LIMIT else candidates


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


def _count_masked(
    chain: Sequence[Step], params: SamplingDefaults, infill_tokens: InfillTokens | None
) -> Sequence[Step]:
    """Return the chain with steps that count masked candidates, if it has top-n-sigma and a sampler that needs them."""
    names = [step.name for step in chain]
    needs_count = "infill" in names or ("temperature" in names and not has_fixed_temperature(params))
    if "top_n_sigma" not in names or not needs_count:
        return chain
    first, masked = names.index("top_n_sigma"), MaskedCount()
    counting = [step._replace(apply=_counting(step, params, masked, infill_tokens)) for step in chain[first:]]
    counting[0] = counting[0]._replace(apply=masked.begun_by(counting[0].apply))
    return [*chain[:first], *counting]


def _counting(step: Step, params: SamplingDefaults, masked: MaskedCount, infill_tokens: InfillTokens | None) -> Apply:
    """Return a step that does the same, and changes or uses the count."""
    if step.name == "temperature" and not has_fixed_temperature(params):
        return dynamic_temperature_step(params, masked)
    if step.name == "top_n_sigma":
        return masked.raised_by(step.apply)
    if step.name == "infill" and infill_tokens is not None:
        return masked.lowered_by(infill_step(infill_tokens, masked), 0)
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
