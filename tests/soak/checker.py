"""Records all events that the readers of jobs received, and finds the violations.

The checker uses no state of llamaq: it compares the received events with the accepted jobs, token by token. The reader
named `RESULT` of each finished job has the stored result, and the reader named `STORED` has the events that remain in
Redis at the end of the soak. Every other reader must have received the same output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from llamaq.common.protocol.job_events import Event, Failed, Finished, PromptProgress, Retried, Started, Tokens
from llamaq.common.protocol.job_outcome import Result

STORED = "stored"
"""Name of the reader that has the job's event stream in Redis."""
RESULT = "result"
"""Name of the reader that has the job's result."""
SHOWN = 5
"""Number of violations of each kind that are reported in full."""


@dataclass(frozen=True)
class Accepted:
    """A job whose submit was acknowledged."""

    n_tokens: int | None = None
    """Required number of generated tokens. None: any number."""
    text: str | None = None
    """Required text. None: any text."""
    ending: str | None = None
    """Required ending: a finish reason, or `failed CODE`. None: any finish reason."""
    may_be_short: bool = False
    """The job may be cancelled, so `n_tokens` is an upper bound."""


@dataclass
class Reading:
    """The events that one reader received of one job, in order."""

    events: list[Event] = field(default_factory=list)
    is_whole: bool = True
    """Whether the reader must have received all events. False if it left early or read pub/sub messages."""


@dataclass
class Verdict:
    """The violations by kind, one line each. Without violations, all lists are empty."""

    lost: list[str] = field(default_factory=list)
    """Accepted jobs without a terminal event, and terminal events that a reader did not receive."""
    second_ends: list[str] = field(default_factory=list)
    """Events after the first terminal event."""
    gaps: list[str] = field(default_factory=list)
    """Missing tokens or characters, in the middle or at the end."""
    repeats: list[str] = field(default_factory=list)
    """Tokens or characters that were received twice."""
    changed: list[str] = field(default_factory=list)
    """Different tokens or texts at the same position for two readers."""
    wrong_ends: list[str] = field(default_factory=list)
    """Jobs with another ending than required."""
    others: list[str] = field(default_factory=list)
    """Violations that a scenario found, such as a missed target or an entry left in the queue."""
    n_jobs: int = 0
    n_readings: int = 0
    n_events: int = 0
    n_tokens: int = 0
    """Number of generated tokens of all jobs, repeats excluded."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of violations of each kind."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: len(lines) for name, lines in found.items() if isinstance(lines, list)}

    @property
    def is_clean(self) -> bool:
        return not any(self.counts.values())

    def lines(self) -> Iterator[str]:
        """Yield the first violations of each kind."""
        for name in self.counts:
            found: list[str] = getattr(self, name)
            yield from (f"{name}: {line}" for line in found[:SHOWN])
            if len(found) > SHOWN:
                yield f"{name}: … and {len(found) - SHOWN} more"


class Checker:
    """Collects the events that readers received; `judge` compares them."""

    def __init__(self) -> None:
        self.accepted: dict[str, Accepted] = {}
        self._readings: dict[tuple[str, str], Reading] = defaultdict(Reading)
        self.scenario_violations: list[str] = []
        """Violations that a scenario found."""

    def accept(self, job_id: str, **demands: int | str | bool | None) -> None:
        """Record an acknowledged submit. `demands` are fields of `Accepted`."""
        self.accepted[job_id] = Accepted(**demands)  # type: ignore[arg-type]

    def record_event(self, reader: str, job_id: str, event: Event) -> None:
        """Record an event that a reader received."""
        self._readings[reader, job_id].events.append(event)

    def record_start(self, reader: str, job_id: str, *, is_whole: bool = True) -> None:
        """Record that a reader has started, so that it is checked even if it receives no event."""
        self._readings[reader, job_id].is_whole = is_whole

    def record_result(self, job_id: str, result: Result) -> None:
        """Record the result of a job as a reader that has received all tokens at once."""
        reading = self._readings[RESULT, job_id]
        reading.events.append(Tokens(offset=0, tokens=result.tokens, text_offset=0, text=result.text))
        reading.events.append(Finished(finish_reason=result.finish_reason, stats=result.stats))

    def add_violation(self, text: str) -> None:
        """Record a violation that a scenario found."""
        self.scenario_violations.append(text)

    def n_readers(self, job_id: str) -> int:
        """Return the number of readers of a job, without `STORED` and `RESULT`."""
        return sum(job == job_id and reader not in (STORED, RESULT) for reader, job in self._readings)

    def ends_of(self, job_id: str) -> list[Finished | Failed]:
        """Return the stored terminal events of a job."""
        events = self.events_of(job_id)
        return [event for event in events if isinstance(event, Finished | Failed)]

    def events_of(self, job_id: str, reader: str = STORED) -> list[Event]:
        """Return the events that a reader received of a job."""
        reading = self._readings.get((reader, job_id))
        return reading.events if reading else []

    def judge(self) -> Verdict:
        """Compare all readers of all accepted jobs, and return the violations."""
        verdict = Verdict(
            others=list(self.scenario_violations), n_jobs=len(self.accepted), n_readings=len(self._readings)
        )
        truths = {job_id: _truth(self._truthful(job_id)) for job_id in self.accepted}
        for (reader, job_id), reading in self._readings.items():
            if job_id in truths:
                _judge_reading(verdict, f"{job_id} {reader}", reading, truths[job_id])
        for job_id, accepted in self.accepted.items():
            self._judge_job(verdict, job_id, accepted, truths[job_id])
        verdict.n_events = sum(len(reading.events) for reading in self._readings.values())
        verdict.n_tokens = sum(len(tokens) for tokens, _ in truths.values())
        return verdict

    def _truthful(self, job_id: str) -> list[Event]:
        """Return the result of a job. A job without a result has failed, and its events remain stored."""
        reading = self._readings.get((RESULT, job_id)) or self._readings.get((STORED, job_id))
        return reading.events if reading else []

    def _judge_job(self, verdict: Verdict, job_id: str, accepted: Accepted, truth: tuple[list[int], str]) -> None:
        ends = [_ending(event) for event in self.ends_of(job_id)]
        if not ends:
            verdict.lost.append(f"{job_id}: was accepted, but no terminal event is stored")
            return
        if accepted.ending is None and ends[0].startswith("failed"):
            verdict.wrong_ends.append(f"{job_id}: {ends[0]}")
        elif accepted.ending not in (None, ends[0]):
            verdict.wrong_ends.append(f"{job_id}: {ends[0]} instead of {accepted.ending}")
        if accepted.text not in (None, truth[1]):
            verdict.changed.append(f"{job_id}: {truth[1]!r} instead of {accepted.text!r}")
        n_tokens, wanted = len(truth[0]), accepted.n_tokens
        if wanted is not None and (n_tokens > wanted or (n_tokens < wanted and not accepted.may_be_short)):
            kind = verdict.gaps if n_tokens < wanted else verdict.repeats
            kind.append(f"{job_id}: {n_tokens} tokens instead of {wanted}")


def _ending(event: Finished | Failed) -> str:
    return f"failed {event.code}" if isinstance(event, Failed) else event.finish_reason.value


def _truth(events: list[Event]) -> tuple[list[int], str]:
    """Return all tokens and the whole text of these events. Where two events overlap, the later one counts."""
    tokens: list[int] = []
    text = ""
    for event in events:
        if isinstance(event, Tokens):
            tokens[event.offset : event.offset + len(event.tokens)] = event.tokens
            text = text[: event.text_offset] + event.text
    return tokens, text


def _judge_reading(verdict: Verdict, name: str, reading: Reading, truth: tuple[list[int], str]) -> None:
    n_tokens = n_chars = n_ends = 0
    tokens, text = truth
    for event in reading.events:
        if n_ends and not isinstance(event, Finished | Failed):
            verdict.second_ends.append(f"{name}: {event.type} after the end")
        if isinstance(event, Tokens):
            _judge_offset(verdict, name, event, (n_tokens, n_chars), is_whole=reading.is_whole)
            past, past_text = event.offset + len(event.tokens), event.text_offset + len(event.text)
            if tokens[event.offset : past] != list(event.tokens) or text[event.text_offset : past_text] != event.text:
                verdict.changed.append(f"{name}: differs from the stored events from token {event.offset} on")
            n_tokens, n_chars = max(n_tokens, past), max(n_chars, past_text)
        elif not isinstance(event, Started | Retried | PromptProgress):
            n_ends += 1
    if n_ends > 1:
        verdict.second_ends.append(f"{name}: {n_ends} terminal events")
    if reading.is_whole and not n_ends:
        verdict.lost.append(f"{name}: the reader received no terminal event after token {n_tokens}")
    if n_ends and reading.is_whole and (n_tokens < len(tokens) or n_chars < len(text)):
        verdict.gaps.append(f"{name}: ended at token {n_tokens} of {len(tokens)}, character {n_chars} of {len(text)}")


def _judge_offset(verdict: Verdict, name: str, event: Tokens, past: tuple[int, int], *, is_whole: bool) -> None:
    """Check that an event starts where the previous one ended. `past`: number of tokens and characters before it."""
    n_tokens, n_chars = past
    if is_whole and (event.offset > n_tokens or event.text_offset > n_chars):
        verdict.gaps.append(f"{name}: token {event.offset} follows token {n_tokens - 1}")
    if (event.tokens and event.offset < n_tokens) or (event.text and event.text_offset < n_chars):
        verdict.repeats.append(f"{name}: token {event.offset} was repeated after {n_tokens} tokens")
