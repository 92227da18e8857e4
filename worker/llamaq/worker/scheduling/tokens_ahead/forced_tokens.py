"""Adds the tokens that grammars force to the batch of a tick.

While a grammar allows a single token, such as in the name of a field of a JSON schema, this token is known before the
logits are. Forced tokens are computed beside the last sampled token, as a prompt is, and the next token is sampled
after them. So they need neither a tick of their own nor logits.

On a GPU, a batch with another number of tokens than the last one takes much longer, because llama.cpp cannot reuse its
graph. So a tick gets forced tokens only if those of all slots together pay (`ForcedTokenGain`). Otherwise, each of them
is drawn in a tick of its own, as the only token that its mask allows. The tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.slot import Run
from llamaq.worker.scheduling.tokens_ahead.decode_times import DecodeTimes
from llamaq.worker.scheduling.tokens_ahead.forced_token_gain import ForcedTokenGain
from llamaq.worker.scheduling.tokens_ahead.speculation import n_within

MAX_IN_TICK = 64
"""Largest number of forced tokens in one tick."""
FIRST_TOKENS = 4
"""Largest number of forced tokens in the tick that measures their time, if the strategy limits the time of ticks."""


class ForcedTokens:
    """Decides how many forced tokens a tick computes.

    Args:
        can_remove: Whether the last tokens of a sequence can be removed after they were decoded. If not, jobs with stop
            strings get no forced tokens: the job may end among them, and its sequence would then lose all cells.
        is_limited: Whether the strategy limits the time of ticks.

    Threads: while the engine thread calls `adds_after` during repeated ticks, another thread may call `record_tick` for
    earlier ones of these ticks. The engine thread makes all other calls.
    """

    def __init__(self, *, can_remove: bool, is_limited: bool) -> None:
        self._can_remove = can_remove
        self._is_limited = is_limited
        self._times = DecodeTimes()
        """The times of ticks, for the limit of the strategy. Ticks of jobs without a grammar are recorded too."""
        self._gain = ForcedTokenGain()
        self._is_recording = False
        """Whether the last tick was passed to `_gain`."""
        self._n_max = MAX_IN_TICK
        """Largest number of forced tokens of a tick within the limit of the strategy, as of the last plan. While the
        times of ticks are not known, the limit counts as large enough."""

    def add(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with forced tokens, if they pay.

        Beside prompts, they always do: llama.cpp builds the graph of such a batch in any case.

        Args:
            batch: The batch of the strategy.
            room: Largest number of tokens to add.
            limit_s: Longest time of a tick with them, in seconds.
        """
        if self._is_limited:
            n_within_limit = self._n_within_limit(limit_s, batch.n_decode)
            self._n_max = MAX_IN_TICK if n_within_limit is None else n_within_limit
            room = min(room, n_within_limit or 0)
        room = min(room, MAX_IN_TICK)
        decode = []
        n_forced = 0
        for part in batch.decode:
            forced = self._forced_after(part, room)
            room -= len(forced)
            n_forced += len(forced)
            decode.append(part._replace(forced=forced) if forced else part)
        if not n_forced or not (batch.prefill or self._gain.pays_off(batch.n_decode, n_forced)):
            return batch
        return replace(batch, decode=tuple(decode))

    def adds_after(self, runs: Sequence[Run]) -> bool:
        """Return whether the next plan adds tokens that must follow the sampled ones, if the batch has room for them.

        Args:
            runs: The runs of a batch without prompts. Their histories do not have the sampled tokens yet. So the first
                token that must follow a history is the one that was sampled.
        """
        if not self._n_max:
            return False
        n_forced = 0
        for run in runs:
            if self.may_follow(run):
                n_forced += max(0, len(run.job.sampler.forced_tokens(run.tokens, run.n_prompt)) - 1)
        return n_forced > 0 and self._gain.pays_off(len(runs), min(n_forced, self._n_max))

    def may_follow(self, run: Run) -> bool:
        """Return whether forced tokens of this run may be added to a batch."""
        return run.job.sampler.can_prepare and (self._can_remove or not run.job.detokenizer.may_end)

    def left_s(self, batch: Batch, limit_s: float) -> float:
        """Return how much of the time limit of a tick its forced tokens leave for drafts, in seconds."""
        if not self._is_limited or not batch.n_forced:
            return limit_s
        times = self._times.ahead_times(batch.n_decode)
        if times is None:
            return 0.0  # without drafts, this tick measures them
        return limit_s - times.seconds(batch.n_forced)

    def record_tick(self, batch: Batch, seconds: float, *, has_grammar: bool = True) -> None:
        """Learn from the time of a tick. `has_grammar`: whether a job of the batch has a grammar."""
        was_recording, self._is_recording = self._is_recording, has_grammar
        if not (has_grammar or self._is_limited):
            return
        has_others = batch.n_prefill > 0 or batch.has_draft_work
        if self._is_limited and not has_others:
            self._times.record(batch.n_decode, batch.n_forced, seconds)
        if not has_grammar:
            return
        if has_others or not was_recording:
            self._gain.record_other()
        if not has_others:
            self._gain.record(batch.n_decode, batch.n_forced, seconds)

    def _n_within_limit(self, limit_s: float, n_decode: int) -> int | None:
        """Return how many forced tokens a tick may have. None: the time of a tick without them is not known."""
        plain_s, times = self._times.plain_s(n_decode), self._times.ahead_times(n_decode)
        if plain_s is None:
            return None
        if times is None:
            return FIRST_TOKENS if limit_s > plain_s else 0
        return int(min(MAX_IN_TICK, n_within(limit_s - plain_s, times.largest_token_s)))

    def _forced_after(self, part: DecodeToken, room: int) -> tuple[int, ...]:
        """Return the forced tokens of a slot. At least one token of the job is left to be sampled after them."""
        run = part.slot.active
        n_max = min(room, run.max_length - len(run.tokens) - 1)
        if n_max <= 0 or not self.may_follow(run):
            return ()
        return tuple(run.job.sampler.forced_tokens(run.tokens, run.n_prompt)[:n_max])

    def __repr__(self) -> str:
        return f"<ForcedTokens {self._times!r} {self._gain!r}>"
