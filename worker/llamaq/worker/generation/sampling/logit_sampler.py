"""Draws tokens from logits: the sampler chain of llama.cpp in numpy, with reproducible draws.

Logit bias and grammar come first, then the samplers in the order of the job (common/sampling.cpp). Only the draws
differ from llama.cpp: the random number is a hash of the seed and the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.job_parts import RowDraw
from llamaq.worker.generation.grammar.pending_constraint import Constraint
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.sampling.allowed_tokens import AllowedTokens
from llamaq.worker.generation.sampling.bad_words import NO_BAD_WORDS, BadWords
from llamaq.worker.generation.sampling.candidate_filters import SORT_LIMIT
from llamaq.worker.generation.sampling.candidates import Candidates, Logits
from llamaq.worker.generation.sampling.infill_sampler import InfillTokens
from llamaq.worker.generation.sampling.logit_adjustment import check_finite
from llamaq.worker.generation.sampling.logit_changes import LogitChanges
from llamaq.worker.generation.sampling.logprobs import drawn_logprobs, token_logprobs
from llamaq.worker.generation.sampling.mirostat_and_adaptive_p import draw_feedback
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget
from llamaq.worker.generation.sampling.running_sums import RunningSums
from llamaq.worker.generation.sampling.sampler_chain import SamplerChain
from llamaq.worker.generation.sampling.sampler_steps import is_greedy
from llamaq.worker.generation.sampling.sequence_breakers import SequenceBreakers
from llamaq.worker.generation.sampling.top_k_draw import TopKDraw
from llamaq.worker.generation.sampling.uniform_numbers import UniformNumbers

NO_BREAKERS = SequenceBreakers()


class LogitSampler:
    """The sampler of one job; implements `core.job_parts.Sampler`.

    Args:
        params: The sampling parameters.
        seed: The seed of the draws.
        logit_bias: Maps token ids to the values that are added to their logits.
        masked_tokens: Tokens that are not drawn, such as the end tokens for `ignore_eos`. There is one exception: if
            the grammar allows end tokens and no other token is left, a masked end token is drawn.
        end_tokens: Tokens that end the job.
        min_tokens: The first `min_tokens` draws mask the end tokens.
        only: The only tokens that may be drawn. None: all.
        bad_words: Sequences of tokens that are not drawn.
        grammar: Restricts the tokens.
        reasoning: Bounds the reasoning. None: it is not bounded.
        n_logprobs: Number of alternatives in `logprobs`. None: `logprobs` is always None.
        has_drawn_logprobs: Whether `logprobs` are the probabilities of the draw, and not those of the model.
        breakers: The sequence breakers of DRY.
        draws: `draw_probability` of each token that earlier attempts generated.
        infill_tokens: What the sampler `infill` needs. None: the job has no such sampler.
    """

    def __init__(
        self,
        params: SamplingDefaults,
        *,
        seed: int,
        logit_bias: Mapping[int, float] | None = None,
        masked_tokens: Iterable[int] = (),
        end_tokens: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        only: TokenSet | None = None,
        bad_words: BadWords = NO_BAD_WORDS,
        grammar: Constraint | None = None,
        reasoning: ReasoningBudget | None = None,
        n_logprobs: int | None = None,
        has_drawn_logprobs: bool = False,
        breakers: SequenceBreakers = NO_BREAKERS,
        draws: Sequence[float] = (),
        infill_tokens: InfillTokens | None = None,
    ) -> None:
        self.logprobs: TokenLogprobs | None = None
        self.draw_probability: float | None = None
        self.can_prepare = grammar is not None
        self._n_model_logprobs = None if has_drawn_logprobs else n_logprobs
        """Number of alternatives in `logprobs`, if these are the probabilities of the model."""
        self._n_drawn_logprobs = n_logprobs if has_drawn_logprobs else None
        """Number of alternatives in `logprobs`, if these are the probabilities of the draw."""
        self._is_greedy = is_greedy(params)
        self._uniform = UniformNumbers(seed)
        self._changes = LogitChanges(
            logit_bias or {}, masked_tokens, end_tokens=end_tokens, min_tokens=min_tokens, bad_words=bad_words
        )
        self._feedback = None if self._is_greedy else draw_feedback(params, draws)
        accepts_masked = self._feedback is None or self._feedback.accepts_masked
        self._chain = SamplerChain(
            params, self._uniform, breakers, draw_accepts_masked=accepts_masked, infill_tokens=infill_tokens
        )
        is_restricted = grammar is not None or reasoning is not None or only is not None
        self._find_shortcuts(is_restricted=is_restricted, has_logprobs=n_logprobs is not None)
        self._allowed = AllowedTokens(
            grammar,
            reasoning,
            only=only,
            n_best=self._n_best(),
            can_force=self._can_force,
            never=self._changes.unforced,
            end_tokens=end_tokens,
            min_tokens=min_tokens,
        )

    def _find_shortcuts(self, *, is_restricted: bool, has_logprobs: bool) -> None:
        """Find the faster ways to draw the same tokens.

        Args:
            is_restricted: Whether a grammar, a bound of the reasoning or a list restricts the tokens.
            has_logprobs: Whether each token has `logprobs`.
        """
        changes, chain = self._changes, self._chain
        is_plain = self._feedback is None and self._n_drawn_logprobs is None
        self._top_k_draw = chain.top_k_draw if is_plain else None
        needs_all_logits = self._feedback is not None or has_logprobs or changes.raises_logits
        self._can_force = not needs_all_logits and not changes.has_bias
        """Whether a token that must follow is not drawn."""
        self._takes_best = self._is_greedy and self._can_force and not chain.penalties
        """Whether the token with the largest logit of all is drawn if it is allowed."""
        self._takes_all = not is_restricted and not chain.penalties
        """Whether neither a restriction nor a penalty changes the logits."""
        n_largest = None if is_restricted or needs_all_logits else chain.n_largest
        self.n_largest = None if n_largest is None else n_largest + changes.n_changed
        self.checks_logits = self._top_k_draw is not None and not is_restricted
        needs_more = has_logprobs or changes.has_bias or changes.depends_on_history
        self._row_draw = self._top_k_draw if self._takes_all and not needs_more else None
        """The draw, if a token depends on the logits alone."""

    def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
        """Compute the masks of the grammar; see `core.job_parts.Sampler`."""
        self._allowed.prepare(history, n_prompt, n_history, draft)

    def forced_tokens(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:
        """Return the tokens that must follow `history`; see `core.job_parts.Sampler`."""
        return self._allowed.forced(history, n_prompt)

    def row_draw(self, position: int) -> RowDraw | None:
        """Return how the token at a position is drawn, if it can be drawn from the logits alone; see
        `core.job_parts.Sampler`.
        """
        top_k = self._row_draw
        if top_k is None:
            return None
        return top_k.row_draw(self._uniform.at(position), self._changes.masked_at(position))

    def sample(self, logits: Logits, history: Sequence[int], n_prompt: int, drawn: int | None = None) -> int:
        """Draw the token that follows `history`; see `core.job_parts.Sampler`. Changes `logits`."""
        if drawn is not None:
            if self._row_draw is not None:
                return drawn
            if self._takes_best:
                if not self._changes.masks(drawn, history, n_prompt) and self._allowed.allows(drawn, history, n_prompt):
                    return drawn
                logits[drawn] = -inf
        n_logprobs = self._n_model_logprobs
        computed = logits if n_logprobs is None else logits.copy()
        if self._top_k_draw is None:
            token = self._sample(logits, history, n_prompt)
        else:
            token = self._sample_top_k(self._top_k_draw, logits, history, n_prompt)
        if n_logprobs is not None:
            self.logprobs = token_logprobs(computed, token, n_logprobs)
        return token

    def sample_largest(
        self, tokens: npt.NDArray[np.int32], logits: Logits, history: Sequence[int], n_prompt: int
    ) -> int:
        """Draw the token that `sample` would draw; see `core.job_parts.Sampler`."""
        check_finite(float(logits.max()))
        order = tokens.argsort()
        candidates = Candidates(logits.take(order), tokens.take(order).astype(np.intp))
        self._changes.apply_to_some(candidates, history, n_prompt)
        for penalize in self._chain.penalties:
            candidates = penalize(candidates, history, len(history) - n_prompt)
        if self._top_k_draw is not None:
            return self._draw_of_few(self._top_k_draw, candidates, len(history) - n_prompt)
        return self._choose(candidates, len(history) - n_prompt, history, len(tokens))

    def close(self) -> None:
        """Free the memory of the grammar. May be called twice."""
        self._allowed.close()

    def _n_best(self) -> int | None:
        """Return the number of tokens with the largest logits among which the token is drawn. None: all tokens."""
        if self._chain.penalties:
            return None
        if self._is_greedy:
            return 1
        return None if self._top_k_draw is None else self._top_k_draw.k

    def _sample_top_k(self, top_k: TopKDraw, logits: Logits, history: Sequence[int], n_prompt: int) -> int:
        """Do the same as `_sample`, with the fast draw. Every logit is checked."""
        if self._takes_all:
            self._changes.apply(logits, history, n_prompt)
        else:
            candidates = self._penalized(logits, history, n_prompt)
            if len(candidates) <= SORT_LIMIT:
                return self._draw_of_few(top_k, candidates, len(history) - n_prompt)
            if candidates.tokens is not None:
                return self._choose(candidates, len(history) - n_prompt, history, logits.size)
        token = top_k.draw(logits, self._uniform.at(len(history) - n_prompt))
        return self._allowed.end_token() if token is None else token

    def _draw_of_few(self, top_k: TopKDraw, candidates: Candidates, position: int) -> int:
        candidates = candidates.without_masked()
        if not len(candidates):
            return self._allowed.end_token()
        check_finite(float(candidates.max_logit))
        if len(candidates) == 1:  # usual where a grammar forces a text
            return candidates.token_at(0)
        tokens = np.arange(len(candidates)) if candidates.tokens is None else candidates.tokens
        return top_k.draw_of(candidates.logits, tokens, self._uniform.at(position))

    def _sample(self, logits: Logits, history: Sequence[int], n_prompt: int) -> int:
        candidates = self._penalized(logits, history, n_prompt)
        return self._choose(candidates, len(history) - n_prompt, history, logits.size)

    def _choose(self, candidates: Candidates, position: int, history: Sequence[int], n_vocab: int) -> int:
        """Apply the rest of the chain to the candidates and draw one."""
        if self._is_greedy:
            token = _best_token(candidates)
            if token is None:
                return self._allowed.end_token()
            if self._n_drawn_logprobs is not None:
                self.logprobs = drawn_logprobs(Candidates.only(token), 0, self._n_drawn_logprobs)
            return token
        candidates = self._filtered(candidates, history, position)
        return self._draw(candidates, position, n_vocab) if len(candidates) else self._allowed.end_token()

    def _penalized(self, logits: Logits, history: Sequence[int], n_prompt: int) -> Candidates:
        """Apply bias, masks, grammar, and the penalties at the beginning of the chain. Changes `logits`."""
        self._changes.apply(logits, history, n_prompt)
        candidates = self._allowed.restrict(logits, history, n_prompt)
        for penalize in self._chain.penalties:
            candidates = penalize(candidates, history, len(history) - n_prompt)
        return candidates

    def _filtered(self, candidates: Candidates, history: Sequence[int], position: int) -> Candidates:
        """Apply the rest of the chain. Returns no candidate if all are masked."""
        candidates = self._chain.reduce(candidates, history, position)
        if not len(candidates):
            return candidates
        largest = float(candidates.max_logit)
        check_finite(largest)
        if largest == -inf:
            return candidates.head(0)
        for apply in self._chain.filters:
            candidates = apply(candidates, history, position)
        return candidates

    def _draw(self, candidates: Candidates, position: int, n_vocab: int) -> int:
        """Draw a candidate by inverse transform sampling.

        The weights are added in ascending order of ids. The first candidate is drawn at which the sum exceeds `u *
        total`, where `u` is the random number of this position. The order of logits is not used, because logits change
        slightly when another worker resumes the job. A rounding error could then exchange two tokens and change the
        draw.
        """
        candidates, probabilities = candidates.by_token(), None
        if self._feedback is not None:
            candidates, probabilities = self._feedback.shape(candidates, position, n_vocab)
        sums = RunningSums(candidates.weights())
        index = sums.first_above(self._uniform.at(position) * sums.total)
        if self._n_drawn_logprobs is not None:
            self.logprobs = drawn_logprobs(candidates, index, self._n_drawn_logprobs)
        if self._feedback is not None and probabilities is not None:
            self.draw_probability = float(probabilities[index])
            self._feedback.record(self.draw_probability)
        return candidates.token_at(index)


def _best_token(candidates: Candidates) -> int | None:
    """Return the token with the largest logit. None: there is no candidate, or all are masked."""
    if not len(candidates):
        return None
    index = int(candidates.logits.argmax())
    largest = float(candidates.logits[index])
    check_finite(largest)
    return None if largest == -inf else candidates.token_at(index)
