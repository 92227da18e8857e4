"""The generated tokens of one attempt, and what the client gets of each token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.worker.core.job import PreparedJob


@dataclass(slots=True, eq=False)
class JobOutput:
    """The generated tokens of one attempt, with those that earlier attempts generated."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """For each token, the text that the token completed. It may be empty."""
    text_ends: list[int] = field(default_factory=list)
    """For each token, the number of characters of text up to and including that token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For each token, its probabilities. Empty if the job did not ask for them."""
    draws: list[float] = field(default_factory=list)
    """For each token, its probability in the draw. Empty if the sampler does not depend on it. Some are missing if it
    does in one attempt, and does not in another one, whose worker has other defaults. Then none is published."""
    tag_offsets: list[int] = field(default_factory=list)
    """Positions in the text, in characters, of the tokens that are tags, in ascending order."""
    withheld: str = ""
    """The text of the last tokens that is withheld after the last token. Empty until this attempt adds a token."""
    prompt_logprobs: PromptLogprobs | None = None
    """The probabilities of the prompt's tokens, from the first token on, if the job asked for them."""

    @classmethod
    def of_earlier_attempts(cls, prepared: PreparedJob) -> JobOutput:
        """Return the output that earlier attempts of a job have published."""
        output = cls(
            logprobs=list(prepared.logprobs),
            draws=list(prepared.draws),
            tag_offsets=list(prepared.tag_offsets),
            prompt_logprobs=prepared.prompt_logprobs,
        )
        for token, text in zip(prepared.job.generated_before, prepared.texts, strict=True):
            output.add(token, text)
        return output

    def add(
        self,
        token: int,
        text: str,
        logprobs: TokenLogprobs | None = None,
        draw_probability: float | None = None,
        tag_offset: int | None = None,
        withheld: str = "",
    ) -> None:
        """Add a generated token, the text that the token completed, and what else the job needs of the token."""
        self.tokens.append(token)
        self.withheld = withheld
        if tag_offset is not None:
            self.tag_offsets.append(tag_offset)
        if draw_probability is not None:
            self.draws.append(draw_probability)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.texts.append(text)
        self.text_ends.append((self.text_ends[-1] if self.text_ends else 0) + len(text))

    def text(self) -> str:
        """Return the text of all tokens."""
        return "".join(self.texts)

    def encode_from(self, offset: int, final_text: str) -> bytes:
        """Return the event `tokens` with the tokens from `offset` on, and then `final_text`, which has no token."""
        text_offset = self.text_ends[offset - 1] if offset else 0
        text = "".join(self.texts[offset:]) + final_text
        tag_offsets = self._tag_offsets_in(text_offset, text) if self.tag_offsets else ()
        return codec.encode_tokens(
            offset,
            self.tokens[offset:],
            text_offset,
            text,
            self.logprobs[offset:],
            self.draws[offset:] if len(self.draws) == len(self.tokens) else (),
            tag_offsets,
            None if offset else self.prompt_logprobs,
        )

    def encode_withheld(self) -> bytes:
        """Return an event `tokens` without tokens that has the withheld text. Empty: no text is withheld."""
        if not self.withheld:
            return b""
        text_offset = self.text_ends[-1]
        tag_offsets = self._tag_offsets_in(text_offset, self.withheld)
        return codec.encode_tokens(len(self.tokens), (), text_offset, self.withheld, tag_offsets=tag_offsets)

    def encode_all(self, text: str) -> bytes:
        """Return the field `output` of a job that has ended, with this text."""
        tag_offsets = self._tag_offsets_in(0, text)
        return codec.encode_output(text, self.tokens, self.logprobs, tag_offsets, self.prompt_logprobs)

    def _tag_offsets_in(self, text_offset: int, text: str) -> Sequence[int]:
        """Return the offsets of the tags that begin in this text, which is `text_offset` characters after the start."""
        first = bisect_left(self.tag_offsets, text_offset)
        return self.tag_offsets[first : bisect_left(self.tag_offsets, text_offset + len(text), first)]
