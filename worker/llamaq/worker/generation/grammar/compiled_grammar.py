"""A grammar that restricts one job's output, by llama.cpp's grammar sampler.

llama.cpp aborts the process when it is told to accept a token that its grammar does not allow, and prints grammars
that do not parse to stderr. So grammars come here from the `GrammarWarden` only, and no token is accepted here that
was not allowed a moment before.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.vocab.vocab import Vocab

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
SLOW_S = 1.0
"""A step that takes longer, in processor time, ends the job: the next one could take for ever."""
OVERLONG_NULS = (b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80")
"""llama.cpp takes these for the end of a token when it applies a grammar, and for a character when it accepts one."""


class Grammar:
    """The state of a grammar after the tokens that it followed."""

    def __init__(self, vocab: Vocab, text: str, root: str = "root") -> None:
        """`text` is GBNF that the warden has compiled. Raises `JobRejected` when it does not compile."""
        sampler = llama_cpp.llama_sampler_init_grammar(vocab.pointer, text.encode(), root.encode())
        if not sampler:
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, "the grammar does not compile")
        self._vocab = vocab  # what llama.cpp keeps a pointer to
        self._sampler = sampler
        self._close = weakref.finalize(self, llama_cpp.llama_sampler_free, sampler)
        self._n_followed = 0
        self._last_bytes = b""
        self._one = np.zeros(1, CANDIDATE)

    def follow(self, generated: Sequence[int]) -> None:
        """Accept those of the generated tokens that it has not followed yet."""
        for token in generated[self._n_followed :]:
            if not self.allows(token):
                message = f"token {token} at {self._n_followed} of the output is not allowed by the grammar"
                raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, message)
            with _bounded_time():
                llama_cpp.llama_sampler_accept(self._sampler, token)
            self._n_followed += 1
            self._last_bytes = (self._last_bytes + self._vocab.piece(token))[-3:]

    def allows(self, token: int) -> bool:
        """Whether `token` may follow; an end token may where the grammar can end."""
        text = self._last_bytes + self._vocab.piece(token)
        if any(nul in text for nul in OVERLONG_NULS):
            return False
        self._one["id"] = token
        return bool(self._apply(self._one)[0])

    def allowed(self, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of `tokens` may follow."""
        candidates = np.empty(len(tokens), CANDIDATE)
        candidates["id"] = tokens
        return self._apply(candidates)

    def close(self) -> None:
        """Free it; may be called twice."""
        self._close()

    def __repr__(self) -> str:
        return f"<Grammar after {self._n_followed} tokens>"

    def _apply(self, candidates: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Which candidates may follow: the others get a logit of minus infinity."""
        candidates["logit"] = 0
        array = llama_cpp.llama_token_data_array(
            data=candidates.ctypes.data_as(llama_cpp.llama_token_data_p),
            size=len(candidates),
            selected=-1,
            sorted=False,
        )
        with _bounded_time():
            llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        allowed: npt.NDArray[np.bool_] = candidates["logit"] == 0
        return allowed


@contextmanager
def _bounded_time() -> Iterator[None]:
    """Raise `JobRejected` after a step that was slow."""
    started_s = time.thread_time()
    yield
    took_s = time.thread_time() - started_s
    if took_s > SLOW_S:
        message = f"the grammar took {took_s:.1f} s for one token: make it less ambiguous"
        raise JobRejected(ErrorCode.INVALID_GRAMMAR, message)
