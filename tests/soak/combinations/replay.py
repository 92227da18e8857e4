"""Recomputes each token of a job: the history is computed alone, and the job's sampler draws from these logits.

Logits differ a little with the shape of the batch. Therefore a token may differ from the replay if a small change of
the logits leads to this token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.soak.combinations.setting_draws import Settings, reference_settings
from tests.soak.combinations.tracked_job import TrackedJob, job_of

from llamaq.common.protocol.job_outcome import FinishReason, TokenLogprobs
from llamaq.worker.core.job import Job
from llamaq.worker.plugins import load_strategy
from llamaq.worker.process.generation_parts import GenerationParts

Logits = npt.NDArray[np.float32]

NOISE = {"q8_0": 0.05, "bf16": 0.04}
NOISE_OF_FLOATS = 0.015
"""How much logits may change with the shape of the batch, in standard deviations of the logits, by the type of the KV
cells. A rounding error in a coarse type changes the logits of all later tokens."""
LOGPROB_NOISE = 4.0
"""How much more a logarithm of a probability may differ. The largest differences are in the most improbable tokens."""
N_NOISY_DRAWS = 25
N_HALVINGS = 16
"""Steps of a bisection. It then moves the draw by about a millionth, the rounding of the logits. A token of a sampled
text may be as improbable as that.
"""
CHUNK = 256
SCORED_CHUNK = 16
"""Number of tokens of a prompt whose logits are read at once."""


class Replay:
    """A plain worker without jobs, whose engine computes one history after the other.

    Args:
        model: The model.
        settings: Settings of the workers whose jobs are replayed.
    """

    def __init__(self, model: Path, settings: Settings) -> None:
        plain = reference_settings(settings)
        self._parts = GenerationParts(model, plain, load_strategy(plain.batch_strategy, None), "replay")
        self._end_tokens = self._parts.engine.vocab.end_tokens
        types = (plain.cache_type_k, plain.cache_type_v)
        self._noise = max(NOISE.get(each, NOISE_OF_FLOATS) for each in types)
        self.n_tokens = self.n_near_ties = self.n_scores = 0

    def close(self) -> None:
        self._parts.close()
        self._parts.free_model()

    def faults_of(self, tracked: TrackedJob, context_limits: Sequence[int]) -> Iterator[str]:
        """Yield how an ended job differs from its replay.

        Args:
            tracked: The job.
            context_limits: The largest number of tokens of a job, for each worker that may have run it.
        """
        job = self._job_at(tracked, 0)
        detokenizer, text = job.detokenizer, ""
        for position, row in enumerate(self._rows(job, [*tracked.prompt, *tracked.tokens])):
            expected = self._expected(tracked, position)
            if expected is None or detokenizer.has_ended:
                break
            self.n_tokens += 1
            drawn = _draw(job, row, [*tracked.prompt, *tracked.tokens[:position]])
            if drawn not in expected:
                if not self._is_near_tie(tracked, position, row, expected):
                    yield f"token {position} is {expected} instead of {drawn}"
                    return
                self.n_near_ties += 1
            if position == len(tracked.published):
                break
            yield from self._faults_of_logprobs(tracked, position, row)
            text += detokenizer.feed(tracked.tokens[position])
            if tracked.published[position].draw_probability is not None:
                job.close()  # the next draw depends on this probability, which differs a little from that of the replay
                job = self._job_at(tracked, position + 1)
        job.close()
        text += detokenizer.finish()
        if text != tracked.text:
            yield f"the text is {tracked.text!r} instead of {text!r}"
        yield from self._faults_of_scores(tracked)
        yield from faults_of_end(tracked, context_limits)

    def _faults_of_scores(self, tracked: TrackedJob) -> Iterator[str]:
        """Yield how the probabilities of the prompt differ from those of the prompt computed alone."""
        found, n_top = tracked.prompt_logprobs, tracked.request.prompt_logprobs
        if found is None or n_top is None:
            if (found is None) != (n_top is None) and tracked.reason in (FinishReason.STOP, FinishReason.LENGTH):
                yield f"the probabilities of the prompt are {found}"
            return
        if found.tokens != tuple(tracked.prompt) or found.n_top != n_top:
            yield f"{found!r} is not of the prompt"
            return
        job = self._job_at(tracked, 0)
        rows = self._prompt_rows(job)
        job.close()
        for position, (entry, row) in enumerate(zip(found[1:], rows, strict=True)):
            assert entry is not None
            logprobs = TokenLogprobs(entry.logprob, entry.top)
            yield from self._faults_of_values(f"prompt token {position + 1}", logprobs, entry.token, row)
            self.n_scores += 1

    def _prompt_rows(self, job: Job) -> list[Logits]:
        """Return the logits after each token of the prompt but the last."""
        context, tokens, rows = self._parts.engine.context, job.prompt[:-1], list[Logits]()
        context.clear()
        context.use_adapters(job.adapter_scales)
        for start in range(0, len(tokens), SCORED_CHUNK):
            context.batch.clear()
            context.batch.add_draft(tokens[start : start + SCORED_CHUNK], start, 0)
            assert context.decode() == 0
            rows += list(context.logits(len(context.batch)).copy())
        return rows

    def _job_at(self, tracked: TrackedJob, position: int) -> Job:
        """Return the job with a sampler that has drawn the first `position` tokens."""
        return job_of(tracked.prepare(self._parts.preparer, position))

    def _expected(self, tracked: TrackedJob, position: int) -> Sequence[int] | None:
        """Return the tokens that the replay may draw at a position. None: nothing is drawn there."""
        if position < len(tracked.published):
            return (tracked.tokens[position],)
        ends = self._end_tokens.union(tracked.request.stop_token_ids)
        return tuple(ends) if tracked.reason is FinishReason.STOP else None

    def _rows(self, job: Job, history: Sequence[int]) -> Iterator[Logits]:
        """Yield the logits after the prompt, and after each generated token."""
        context, n_prompt = self._parts.engine.context, len(job.prompt)
        context.clear()
        context.use_adapters(job.adapter_scales)
        starts = [*range(0, n_prompt, CHUNK), *range(n_prompt, len(history))]
        for start, end in zip(starts, [*starts[1:], len(history)], strict=True):
            context.batch.clear()
            context.batch.add_chunk(history[start:end], start, 0, has_row=end >= n_prompt)
            assert context.decode() == 0
            if end >= n_prompt:
                yield context.logits(1)[0].copy()

    def _is_near_tie(self, tracked: TrackedJob, position: int, row: Logits, expected: Sequence[int]) -> bool:
        """Return whether small changes of the logits lead to one of the expected tokens."""
        history = [*tracked.prompt, *tracked.tokens[:position]]
        noise = self._noise * float(row.std())

        def draw(changed: Logits) -> int:
            job = self._job_at(tracked, position)
            token = _draw(job, changed.astype(np.float32, copy=False), history)
            job.close()
            return token

        if any(draw(changed) in expected for changed in _with_noise(row, expected, noise)):
            return True
        return any(_is_reached(draw, row, token, noise) for token in expected)

    def _faults_of_logprobs(self, tracked: TrackedJob, position: int, row: Logits) -> Iterator[str]:
        logprobs = tracked.published[position].logprobs
        if (logprobs is None) != (tracked.request.logprobs is None):
            yield f"the probabilities of token {position} are {logprobs}"
        if logprobs is None or tracked.request.post_sampling_probs:
            return
        yield from self._faults_of_values(f"token {position}", logprobs, tracked.tokens[position], row)

    def _faults_of_values(self, where: str, logprobs: TokenLogprobs, own: int, row: Logits) -> Iterator[str]:
        computed = row.astype(np.float64)
        computed -= computed.max() + np.log(np.exp(computed - computed.max()).sum())
        for token, value in _all_of(logprobs, own):
            if abs(computed[token] - value) > LOGPROB_NOISE * self._noise * row.std():
                yield f"the logprob of {token} at {where} is {value} instead of {computed[token]}"


def _draw(job: Job, row: Logits, history: Sequence[int]) -> int:
    drawn = None if job.sampler.checks_logits else int(row.argmax())
    return job.sampler.sample(row.copy(), history, len(job.prompt), drawn)


def _with_noise(row: Logits, expected: Sequence[int], noise: float) -> Iterator[Logits]:
    """Yield the logits with more or less weight of the expected tokens, and with random changes of about `noise`."""
    for change in (noise, -noise):
        yield row + np.isin(np.arange(len(row)), expected) * change
    rng = np.random.default_rng(0)
    for factor in (0.1, 0.3, 1.0):
        for _ in range(N_NOISY_DRAWS):
            yield (row + rng.standard_normal(len(row)) * factor * noise).astype(np.float32)


def _is_reached(draw: Callable[[Logits], int], row: Logits, token: int, noise: float) -> bool:
    """Return whether a draw reaches a token if all logits of lower ids change by the same number, at most `noise`.

    A draw adds the probabilities in the order of the token ids. More weight of the lower ids moves it to a lower id, so
    a bisection finds the change.
    """
    is_lower = np.arange(len(row)) < token
    low, high = -noise, noise
    for _ in range(N_HALVINGS):
        change = (low + high) / 2
        drawn = draw(row + is_lower * change)
        if drawn == token:
            return True
        low, high = (change, high) if drawn > token else (low, change)
    return False


def _all_of(logprobs: TokenLogprobs, token: int) -> list[tuple[int, float]]:
    return [(token, logprobs.logprob), *logprobs.top]


def faults_of_end(tracked: TrackedJob, context_limits: Sequence[int]) -> Iterator[str]:
    """Yield how the tokens and the end of a job differ from what its options say."""
    n_tokens, request, end = len(tracked.published), tracked.request, tracked.end
    assert end is not None
    if end.stats.generated_tokens != n_tokens:
        yield f"the stats say {end.stats.generated_tokens} tokens instead of {n_tokens}"
    if tracked.reason is FinishReason.LENGTH:
        n_max = max(context_limits) if request.max_tokens is None else request.max_tokens
        wanted = [min(limit - len(tracked.prompt), n_max) for limit in context_limits]
        if not min(wanted) <= n_tokens <= max(wanted):
            yield f"it ended with `length` after {n_tokens} tokens instead of {wanted}"
    if tracked.reason is FinishReason.STOP and n_tokens < request.min_tokens and not request.constraints:
        yield f"it ended after {n_tokens} tokens instead of {request.min_tokens}"
    tokens = {token.token for token in tracked.published}
    if stops := tokens.intersection(request.stop_token_ids):
        yield f"it has the stop tokens {stops}"
    if request.allowed_token_ids is not None and (others := tokens.difference(request.allowed_token_ids)):
        yield f"it has the tokens {others}, which are not allowed"
    if tracked.reason is FinishReason.CANCELLED and not tracked.is_cancelled:
        yield "it was cancelled without a request"
    if tracked.reason is FinishReason.DEADLINE and request.timeout_s is None and request.generation_timeout_s is None:
        yield "it reached a deadline, although it has none"
    yield from _faults_of_stats(tracked)


def _faults_of_stats(tracked: TrackedJob) -> Iterator[str]:
    request, end = tracked.request, tracked.end
    assert end is not None
    if request.draft_max == 0 and end.stats.drafted_tokens:
        yield f"{end.stats.drafted_tokens} tokens were drafted, although it wants none"
    if tracked.n_attempts > 1 or end.stats.preempted_ms is not None:
        return  # it may reuse its own cells
    n_reused = end.stats.prefix_cache_tokens
    assert isinstance(request.cache_public, int)
    if request.cache_salt.startswith("alone") and n_reused > request.cache_public:
        yield f"{n_reused} tokens of jobs with another salt were reused"
    if not request.cache_prompt and n_reused:
        yield f"{n_reused} tokens were reused, although it shares no cells"
