"""From a request's bytes to a job that is ready for a slot. Runs beside the engine thread, never on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from llamaq.common.errors import ErrorCode, InvalidRequest, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import JobRequest, Message
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.vocab import Vocab
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job, Lease
from llamaq.worker.core.tokens import common_prefix, pack
from llamaq.worker.generation.detokenizer import StreamDetokenizer
from llamaq.worker.generation.grammar.compiled_grammar import Grammar
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.sampler import LogitSampler

SYSTEM_PROMPTS = 32
"""So many chats' system messages are remembered with their tokens."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job, and the text that each of its resumed tokens released."""

    job: Job
    texts: list[str]


class JobPreparer:
    """Validates, tokenizes, and builds what one job needs for itself. Thread-safe."""

    def __init__(
        self,
        vocab: Vocab,
        warden: GrammarSandbox,
        defaults: SamplingDefaults,
        *,
        context_limit: int,
        max_request_bytes: int,
        counts_system_tokens: bool = False,
    ) -> None:
        """With `counts_system_tokens`, `Job.system_tokens` is set for every chat."""
        self._vocab = vocab
        self._warden = warden
        self._defaults = defaults
        self._context_limit = context_limit
        self._max_request_bytes = max_request_bytes
        self._marks_system = counts_system_tokens
        self._system_prefix = lru_cache(maxsize=SYSTEM_PROMPTS)(self._find_system_prefix)

    def prepare(self, payload: bytes, lease: Lease, published: Sequence[int], queue_ms: float) -> PreparedJob:
        """The job in these bytes, as far as earlier attempts `published` it; raises `JobRejected`."""
        try:
            request = codec.decode_request(payload, self._max_request_bytes)
        except InvalidRequest as exc:
            raise JobRejected(ErrorCode.INVALID_REQUEST, str(exc)) from exc
        if request.seed is None:
            raise JobRejected(ErrorCode.INVALID_REQUEST, "seed: missing; submit draws one when the user gives none")
        prompt = self._tokenize(request)
        self._check_tokens(request, prompt)
        detokenizer = StreamDetokenizer(self._vocab, request.stop)
        system_tokens = self._system_tokens(request, prompt)
        public = system_tokens if request.cache_public == "system" else request.cache_public
        job = Job(
            lease=lease,
            request=request,
            prompt=prompt,
            sampler=self._sampler(request),
            detokenizer=detokenizer,
            resumed=list(published),
            queue_ms=queue_ms,
            context_limit=self._context_limit,
            scope=Scope(request.cache_salt, public),
            system_tokens=system_tokens,
        )
        return PreparedJob(job, [detokenizer.feed(token) for token in published])

    def _tokenize(self, request: JobRequest) -> list[int]:
        if request.tokens is not None:
            return list(request.tokens)
        if request.messages is not None:
            return self._vocab.encode_chat(request.messages, max_tokens=self._context_limit)
        prompt = self._vocab.encode(request.prompt or "", max_tokens=self._context_limit)
        if not prompt:
            raise JobRejected(ErrorCode.INVALID_REQUEST, "prompt: empty, and this model has no BOS token to begin with")
        return prompt

    def _system_tokens(self, request: JobRequest, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt are the chat's system messages, with what the template puts around them."""
        system = tuple(takewhile(lambda message: message.role == "system", request.messages or ()))
        if not system or not (self._marks_system or request.cache_public == "system"):
            return 0
        return common_prefix(pack(prompt), self._system_prefix(system))

    def _find_system_prefix(self, system: tuple[Message, ...]) -> bytes:
        """What every chat with these system messages begins with, packed: what two chats have in common."""
        try:
            one, other = (self._vocab.encode_chat([*system, Message(role="user", content=text)]) for text in "ab")
        except JobRejected:
            return b""
        return pack(one[: common_prefix(pack(one), pack(other))])

    def _check_tokens(self, request: JobRequest, prompt: Sequence[int]) -> None:
        n_vocab = self._vocab.n_tokens
        for name, ids in (("tokens", prompt), ("logit_bias", request.logit_bias)):
            if ids and max(ids) >= n_vocab:
                message = f"{name}: token id {max(ids)} is not in the model's vocabulary of {n_vocab}"
                raise JobRejected(ErrorCode.INVALID_TOKEN, message)

    def _sampler(self, request: JobRequest) -> LogitSampler:
        grammar = None
        if request.is_constrained:
            grammar = Grammar(self._vocab, self._warden.compile(request), request.grammar_root)
        return LogitSampler(
            self._defaults.resolve(request),
            seed=request.seed or 0,
            logit_bias=request.logit_bias,
            masked_tokens=self._vocab.end_tokens if request.ignore_eos else frozenset(),
            grammar=grammar,
        )
