"""Adds the tokens that grammars force to the batch of a tick.

While a grammar allows a single token, such as in the name of a field of a JSON schema, this token is known before the
logits are. Forced tokens are computed beside the last sampled token, as a prompt is, and the next token is sampled
after them. So they need neither a tick of their own nor logits.
"""

from __future__ import annotations

from dataclasses import replace

from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.slot import Run
from llamaq.worker.scheduling.tokens_ahead.decode_times import DecodeTimes
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
    """

    def __init__(self, *, can_remove: bool, is_limited: bool) -> None:
        self._can_remove = can_remove
        self._is_limited = is_limited
        self._times = DecodeTimes()

    def add(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with forced tokens.

        Args:
            batch: The batch of the strategy.
            room: Largest number of tokens to add.
            limit_s: Longest time of a tick with them, in seconds.
        """
        room = min(room, MAX_IN_TICK)
        if self._is_limited:
            room = self._room_within(limit_s, room, batch.n_decode)
        decode = []
        for part in batch.decode:
            forced = self._forced_after(part, room)
            room -= len(forced)
            decode.append(part._replace(forced=forced) if forced else part)
        return replace(batch, decode=tuple(decode))

    def may_follow(self, run: Run) -> bool:
        """Return whether forced tokens of this run may be added to a batch."""
        return run.job.sampler.can_prepare and (self._can_remove or not run.job.detokenizer.has_stop_strings)

    def left_s(self, batch: Batch, limit_s: float) -> float:
        """Return how much of the time limit of a tick its forced tokens leave for drafts, in seconds."""
        if not self._is_limited or not batch.n_forced:
            return limit_s
        times = self._times.ahead_times(batch.n_decode)
        if times is None:
            return 0.0  # without drafts, this tick measures them
        return limit_s - times.seconds(batch.n_forced)

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick."""
        if self._is_limited and not batch.n_prefill and not batch.has_draft_work:
            self._times.record(batch.n_decode, batch.n_forced, seconds)

    def _room_within(self, limit_s: float, room: int, n_decode: int) -> int:
        plain_s, times = self._times.plain_s(n_decode), self._times.ahead_times(n_decode)
        if plain_s is None:
            return 0  # this tick measures it
        if times is None:
            return min(room, FIRST_TOKENS) if limit_s > plain_s else 0
        return int(min(room, n_within(limit_s - plain_s, times.largest_token_s)))

    def _forced_after(self, part: DecodeToken, room: int) -> tuple[int, ...]:
        """Return the forced tokens of a slot. At least one token of the job is left to be sampled after them."""
        run = part.slot.active
        n_max = min(room, run.max_length - len(run.tokens) - 1)
        if n_max <= 0 or not self.may_follow(run):
            return ()
        return tuple(run.job.sampler.forced_tokens(run.tokens, run.n_prompt)[:n_max])

    def __repr__(self) -> str:
        return f"<ForcedTokens {self._times!r}>"
