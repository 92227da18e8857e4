"""What one job generated, how much of it Redis has, and what is to be written next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from llamaq.common.errors import JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, Finished
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.scripts import Increment, TerminalWrite
from llamaq.worker.core.job import JobEnded, Lease


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How often a job without per-token events is stored: after so many tokens or seconds, whichever comes first."""

    tokens: int
    every_s: float


@dataclass(slots=True, eq=False)
class JobProgress:
    """What a job generated, and how much of it Redis has."""

    lease: Lease
    checkpoints: Checkpoints | None
    """None: every token is published as it comes."""
    wants_reader: bool
    """Whether it is cancelled when nobody listens."""
    stored: int
    """Tokens that Redis has."""
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The text that each token released."""
    text_ends: list[int] = field(default_factory=list)
    """After each token the characters that were released so far."""
    ending: TerminalWrite | None = None
    stats: JobStats | None = None
    tail: str = ""
    """The text that only the end released."""
    stored_s: float = field(default_factory=time.monotonic)
    """When Redis last took tokens."""
    heard_s: float = field(default_factory=time.monotonic)
    """When somebody was last seen listening."""
    is_cancelling: bool = False
    is_leaving: bool = False
    """It is to be handed back."""

    def add(self, token: int, text: str) -> None:
        """The job generated a token, which released this text."""
        self.tokens.append(token)
        self.texts.append(text)
        self.text_ends.append((self.text_ends[-1] if self.text_ends else 0) + len(text))

    @property
    def may_leave(self) -> bool:
        """Whether it can be handed back: all that it generated is stored, so the next worker goes on from there."""
        return self.is_leaving and self.ending is None and self.stored >= len(self.tokens)

    def increment(self, now: float) -> Increment:
        """What is to be written now of what Redis does not have yet."""
        lease, since = self.lease, self.stored
        tokens = self.tokens[since:] if self._is_due(now) else []
        payload = b""
        # At the end of a job without per-token events its output says everything.
        if (tokens or self.tail) and not (self.checkpoints and self.ending):
            text_offset = self.text_ends[since - 1] if since else 0
            payload = codec.encode_tokens(since, tokens, text_offset, "".join(self.texts[since:]) + self.tail)
        return Increment(
            lease.job_id,
            lease.attempt,
            lease.stream,
            lease.entry_id,
            since,
            len(tokens),
            payload,
            publish=self.checkpoints is None,
        )

    def _is_due(self, now: float) -> bool:
        if self.checkpoints is None or self.ending or self.is_leaving:
            return True
        is_old = now - self.stored_s >= self.checkpoints.every_s
        return is_old or len(self.tokens) - self.stored >= self.checkpoints.tokens

    def take_stored(self, stored: int, now: float) -> None:
        """Redis has so many tokens."""
        if stored != self.stored:
            self.stored, self.stored_s = stored, now

    def close(self, ended: JobEnded) -> None:
        """Take the end of the job in; it is written with the next flush."""
        self.tail, self.stats = ended.text, ended.stats
        if ended.error is not None:
            self.ending = failure(ended.error)
        elif ended.reason is not None:
            event = Finished(finish_reason=ended.reason, stats=ended.stats)
            output = codec.encode_output("".join(self.texts) + self.tail, self.tokens)
            fields = {"finish_reason": ended.reason.value, "stats": codec.encode_model(ended.stats), "output": output}
            self.ending = TerminalWrite(event, fields)
        else:
            raise ValueError(f"job {self.lease.job_id} ended without a reason")


def failure(error: JobRejected) -> TerminalWrite:
    """The end of a job that failed."""
    event = Failed(code=error.code.value, message=error.message)
    return TerminalWrite(event, {"error": codec.encode_event(event)})
