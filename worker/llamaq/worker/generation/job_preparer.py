"""Turns the bytes of a request into a job that can be admitted. Does not run on the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobDefaults, JobRequest
from llamaq.common.protocol.output_params import BAN, CONSTRAINTS
from llamaq.common.protocol.prompt_logprobs import MAX_VALUES
from llamaq.common.protocol.queue_and_worker_state import LoraScale
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.claimed_request import QUICK_BYTES, read_request
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.job import Job, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.adapter_scales import AdapterScales
from llamaq.worker.generation.detokenizer import StreamDetokenizer, TagDetokenizer
from llamaq.worker.generation.grammar.pending_constraint import Constraint, PendingConstraint
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.marked_tags import MarkedTags
from llamaq.worker.generation.ngram_drafter import NgramDrafter
from llamaq.worker.generation.sampling.bad_words import BadWords
from llamaq.worker.generation.sampling.infill_sampler import InfillTokens
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.prompt_scorer import PromptScorer
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget
from llamaq.worker.generation.sampling.sequence_breakers import BreakerFinder, SequenceBreakers
from llamaq.worker.generation.system_prefix import SystemPrefixFinder

GRAMMAR_FIELDS = tuple(name.encode() for name in CONSTRAINTS)
SLOW_FIELDS = (*GRAMMAR_FIELDS, b"dry_multiplier", b"chat_template_kwargs")
"""A job with one of these fields is not quick to prepare: a grammar is compiled, the vocabulary is searched for
sequence breakers, or the work of the chat template depends on its variables."""


class JobPreparer:
    """Validates and tokenizes requests, and creates their samplers and detokenizers. Thread-safe.

    Args:
        vocab: The model's vocabulary.
        grammar_sandbox: Tries grammars safely.
        defaults: Values of parameters that a request does not set.
        context_limit: Largest number of tokens of a job, prompt included.
        max_request_bytes: Largest size of an encoded request.
        adapters: The LoRA adapters of the worker.
        draft_max: Largest number of tokens that are drafted for a job at once. 0: none.
        has_draft_model: Whether the draft model of the worker makes the drafts. Otherwise the job's own text does.
        counts_system_tokens: Whether `Job.system_tokens` is set for every chat, so that the cache can save the state at
            the end of the system messages. Otherwise it is set only for chats with `cache_public="system"`.
        can_score_prompts: Whether the engine returns the logits of all tokens of a prompt.
    """

    def __init__(
        self,
        vocab: Vocab,
        grammar_sandbox: GrammarSandbox,
        defaults: JobDefaults,
        *,
        context_limit: int,
        max_request_bytes: int,
        adapters: Sequence[LoraScale] = (),
        draft_max: int = 0,
        has_draft_model: bool = False,
        counts_system_tokens: bool = False,
        can_score_prompts: bool = True,
    ) -> None:
        self._vocab = vocab
        self._grammar_sandbox = grammar_sandbox
        self._constraint_tokenizer = ConstraintTokenizer(vocab)
        self._breaker_finder = BreakerFinder(vocab)
        self._system_prefix_finder = SystemPrefixFinder(vocab)
        self._marked_tags = MarkedTags(vocab)
        self._tag_lengths = {token: len(tag) for tag, token in vocab.tag_tokens.items()}
        self._defaults = defaults
        self._context_limit = context_limit
        self._max_request_bytes = max_request_bytes
        self._adapter_scales = AdapterScales(adapters)
        self._draft_max = draft_max
        self._has_draft_model = has_draft_model
        self._counts_system_tokens = counts_system_tokens
        self._can_score_prompts = can_score_prompts
        self._has_slow_defaults = bool(defaults.grammar or defaults.dry_multiplier)

    def is_quick(self, payload: bytes) -> bool:
        """Return whether the job of an encoded request is prepared in less than a millisecond, without a grammar."""
        if self._has_slow_defaults or len(payload) > QUICK_BYTES:
            return False
        return not any(name in payload for name in SLOW_FIELDS)

    def may_have_grammar(self, payload: bytes) -> bool:
        """Return False only if the job of an encoded request has no grammar that must be compiled."""
        return bool(self._defaults.grammar) or any(name in payload for name in GRAMMAR_FIELDS)

    def prepare(self, payload: bytes, lease: Lease, published: TokenSpan, times: JobTimes) -> PreparedJob:
        """Return the job of an encoded request.

        Args:
            payload: The request as msgpack.
            lease: The job's entry in Redis.
            published: The output that earlier attempts have published.
            times: When the job was submitted, when it must end, and how long it has had a slot.

        Raises:
            JobRejected: The request is not valid, or its job cannot run on this model.
        """
        request = self._defaults.complete(read_request(payload, lease, self._max_request_bytes))
        if request.embed is not None:
            raise JobRejected(
                ErrorCode.INVALID_REQUEST,
                f"embed: this worker generates text; a job for {request.kind} needs a worker with --embeddings",
            )
        if request.seed is None:
            raise JobRejected(ErrorCode.INVALID_REQUEST, "seed: missing; submit draws a seed for requests without one")
        prompt = self._tokenize(request)
        self._check_tokens(request, prompt)
        self._check_scores(request, prompt)
        detokenizer = self._detokenizer(request)
        texts, tag_offsets = _detokenize(detokenizer, published.tokens)
        grammar = self._grammar(request, published)
        system_tokens = self._system_tokens(request, prompt)
        public = system_tokens if request.cache_public == "system" else request.cache_public
        scope, scales = Scope(request.cache_salt, public), self._adapter_scales.resolve(request.lora)
        job = Job(
            lease=lease,
            request=request,
            prompt=prompt,
            sampler=self._sampler(request, prompt, published, grammar),
            detokenizer=detokenizer,
            generated_before=list(published.tokens),
            times=times,
            context_limit=self._context_limit,
            scope=scope if scales is None else scope.with_adapters(scales),
            adapter_scales=scales,
            drafting=self._drafting(request, [*prompt, *published.tokens]),
            system_tokens=system_tokens,
            prompt_scorer=_prompt_scorer(request, published),
        )
        return PreparedJob(
            job,
            texts,
            list(published.logprobs),
            list(published.draws),
            tag_offsets,
            published.prompt_logprobs,
            finish_preparation=grammar.compile if isinstance(grammar, PendingConstraint) else None,
        )

    def _detokenizer(self, request: JobRequest) -> StreamDetokenizer:
        """Return the detokenizer of a job. Only a job that asks for the texts of control tokens has offsets of tags."""
        make: Callable[..., StreamDetokenizer] = partial(StreamDetokenizer, self._vocab.piece, request.stop)
        if request.special:
            make = partial(TagDetokenizer, self._vocab.piece_with_special, request.stop, self._tag_lengths)
        return make(min_tokens=request.min_tokens, includes_stop=request.include_stop, n_indent=request.n_indent)

    def _drafting(self, request: JobRequest, history: Sequence[int]) -> Drafting | None:
        """Return the speculation of a job. None: the worker or the job has none."""
        n_max = self._draft_max if request.draft_max is None else min(request.draft_max, self._draft_max)
        if not n_max:
            return None
        return Drafting(None if self._has_draft_model else NgramDrafter(history), n_max)

    def _tokenize(self, request: JobRequest) -> list[int]:
        if request.tokens is not None:
            return list(request.tokens)
        if request.messages is not None:
            return self._vocab.encode_chat(request.messages, request.template_options, max_tokens=self._context_limit)
        prompt = self._vocab.encode(request.prompt or "", max_tokens=self._context_limit)
        if not prompt:
            raise JobRejected(ErrorCode.INVALID_REQUEST, "prompt: empty, and this model has no BOS token to begin with")
        return prompt

    def _system_tokens(self, request: JobRequest, prompt: Sequence[int]) -> int:
        """Return the number of prompt tokens of the system messages. 0 if neither the worker nor the job needs it."""
        if request.messages is None or not (self._counts_system_tokens or request.cache_public == "system"):
            return 0
        return self._system_prefix_finder.n_tokens(request.messages, request.template_options, prompt)

    def _check_tokens(self, request: JobRequest, prompt: Sequence[int]) -> None:
        n_vocab = self._vocab.n_tokens
        named = {
            "tokens": prompt,
            "logit_bias": request.logit_bias,
            "stop_token_ids": request.stop_token_ids,
            "allowed_token_ids": request.allowed_token_ids,
        }
        for name, ids in named.items():
            if ids and max(ids) >= n_vocab:
                message = f"{name}: token id {max(ids)} is not in the model's vocabulary of {n_vocab} tokens"
                raise JobRejected(ErrorCode.INVALID_TOKEN, message)

    def _check_scores(self, request: JobRequest, prompt: Sequence[int]) -> None:
        """Refuse `prompt_logprobs` that this worker cannot compute, or that would be too large."""
        if request.prompt_logprobs is None:
            return
        if not self._can_score_prompts:
            message = (
                "prompt_logprobs: not with --backend-sampling, which returns the logits of one token of a sequence"
            )
            raise JobRejected(ErrorCode.INVALID_REQUEST, message)
        n_top = request.prompt_logprobs
        n_values = len(prompt) * (1 + n_top)
        if n_values > MAX_VALUES:
            raise JobRejected(
                ErrorCode.INVALID_REQUEST,
                f"prompt_logprobs: {len(prompt)} tokens with {n_top} alternatives each are {n_values} probabilities, "
                f"more than {MAX_VALUES}; ask for fewer alternatives, or split the prompt",
            )

    def _grammar(self, request: JobRequest, published: TokenSpan) -> Constraint | None:
        """Return the constraint of a job's output. None: it has none.

        A constraint that compiles quickly is compiled later, while the prompt is computed. But a job that draws no
        token would not notice that its constraint is wrong.
        """
        if not request.constraints:
            return None
        checked = self._grammar_sandbox.check(request)
        compile_it = partial(self._constraint_tokenizer.compile, checked.text)
        if checked.compiles_quickly and not published.tokens and request.max_tokens != 0:
            return PendingConstraint(compile_it)
        grammar = compile_it()
        grammar.resume(published.tokens)
        return grammar

    def _sampler(
        self, request: JobRequest, prompt: Sequence[int], published: TokenSpan, grammar: Constraint | None
    ) -> LogitSampler:
        breakers, params = SequenceBreakers(), self._defaults.resolve(request)
        if params.dry_multiplier:
            breakers = self._breaker_finder.breakers(params.dry_sequence_breakers)
        masked, end_tokens = self._masked_tokens(request), self._vocab.end_tokens.union(request.stop_token_ids)
        infill_tokens = None
        if "infill" in params.samplers:
            end = None if request.constraints or request.allowed_token_ids is not None else self._vocab.end_of_turn
            end = None if end in masked else end  # a job whose tokens are restricted does not end in this way
            infill_tokens = InfillTokens(self._vocab.piece, end_tokens, end, request.min_tokens)
        return LogitSampler(
            params,
            seed=request.seed or 0,
            logit_bias={token: bias for token, bias in request.logit_bias.items() if bias > BAN},
            masked_tokens=masked,
            end_tokens=end_tokens,
            min_tokens=request.min_tokens,
            only=self._only_tokens(request),
            bad_words=BadWords.encode(request.bad_words, self._vocab.encode_part),
            grammar=grammar,
            reasoning=self._reasoning_budget(request, prompt),
            n_logprobs=request.logprobs,
            has_drawn_logprobs=request.post_sampling_probs,
            breakers=breakers,
            draws=published.draws,
            infill_tokens=infill_tokens,
        )

    def _masked_tokens(self, request: JobRequest) -> frozenset[int]:
        """Return the tokens that a job never draws, unless its grammar allows no token but the end."""
        masked, ends = self._vocab.suppressed_tokens, self._vocab.end_tokens
        if request.ignore_eos:
            masked = masked | ends.difference(request.stop_token_ids)
        if request.allowed_token_ids is not None:
            masked = masked | ends.difference(request.allowed_token_ids)
        return masked.union(token for token, bias in request.logit_bias.items() if bias <= BAN)

    def _only_tokens(self, request: JobRequest) -> TokenSet | None:
        """Return the only tokens that a job may draw, and the end tokens, which are masked if the job does not name
        them. None: it may draw all.
        """
        if request.allowed_token_ids is None:
            return None
        return TokenSet.of(self._vocab.end_tokens.union(request.allowed_token_ids), self._vocab.n_tokens)

    def _reasoning_budget(self, request: JobRequest, prompt: Sequence[int]) -> ReasoningBudget | None:
        """Return the bound on the reasoning of a job. None: there is none."""
        if request.reasoning_budget is None:
            return None
        tags = self._marked_tags
        return ReasoningBudget(
            request.reasoning_budget,
            tags.pieces(request.reasoning_open),
            tags.pieces(request.reasoning_close),
            self._vocab.encode_part(request.reasoning_close, parse_special=True),
            tags.piece,
            b"".join(map(tags.piece, prompt)),
        )


def _prompt_scorer(request: JobRequest, published: TokenSpan) -> PromptScorer | None:
    """Return the scorer of a job's prompt. None: the job does not ask for `prompt_logprobs`, or an earlier attempt has
    published them, which happens with the first token.
    """
    if request.prompt_logprobs is None or published.tokens:
        return None
    return PromptScorer(request.prompt_logprobs)


def _detokenize(detokenizer: StreamDetokenizer, tokens: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the text that each token completes, and the offsets of the tokens that are tags."""
    texts, tag_offsets = [], []
    for token in tokens:
        texts.append(detokenizer.feed(token))
        if detokenizer.tag_offset is not None:
            tag_offsets.append(detokenizer.tag_offset)
    return texts, tag_offsets
