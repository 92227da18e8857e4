"""A grammar that restricts the output of one job, with the grammar sampler of llama.cpp.

llama_sampler_accept aborts the process on a token that the grammar does not allow. So `Grammar.accept` checks each
token before it calls this function. If llama_sampler_init_grammar cannot parse a grammar, it writes the grammar to
stderr. On other grammars it can abort, hang, or recurse until the stack overflows. So only a grammar that the
`GrammarSandbox` has accepted may be used.
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
from llamaq.common.vocab.llama_vocab import Vocab

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data of llama.cpp."""
MAX_STEP_S = 1.0
"""If one step takes more processor time, the job fails, because the next steps could take much longer."""
OVERLONG_NULS = (b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80")
"""Overlong UTF-8 encodings of NUL. llama_sampler_apply reads them as the end of a token. llama_sampler_accept
reads them as a character, and aborts if the grammar does not allow it. So a token that completes such an encoding is
never allowed."""


class Grammar:
    """A compiled grammar and its state after the accepted tokens. `close` or garbage collection frees it.

    Args:
        vocab: The model's vocabulary. It must not be freed before the grammar.
        text: The grammar in GBNF, checked by the `GrammarSandbox`.
        root: The name of the rule that the whole output must match.

    Raises:
        JobRejected: The grammar does not compile.
    """

    def __init__(self, vocab: Vocab, text: str, root: str = "root") -> None:
        sampler = llama_cpp.llama_sampler_init_grammar(vocab.pointer, text.encode(), root.encode())
        if not sampler:
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, "the grammar does not compile")
        self._vocab = vocab  # llama.cpp keeps a pointer to the vocabulary
        self._sampler = sampler
        self._close = weakref.finalize(self, llama_cpp.llama_sampler_free, sampler)
        self._n_accepted = 0
        self._last_bytes = b""
        self._single = np.zeros(1, TOKEN_DATA)

    def accept(self, generated: Sequence[int]) -> None:
        """Advance the state by the generated tokens that are not accepted yet.

        Args:
            generated: All tokens of the output.

        Raises:
            JobRejected: The grammar does not allow one of them, or a step takes more than `MAX_STEP_S`.
        """
        for token in generated[self._n_accepted :]:
            if not self.allows(token):
                message = f"the grammar does not allow token {token} at position {self._n_accepted} of the output"
                raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, message)
            with _bounded_time():
                llama_cpp.llama_sampler_accept(self._sampler, token)
            self._n_accepted += 1
            self._last_bytes = (self._last_bytes + self._vocab.piece(token))[-3:]

    def allows(self, token: int) -> bool:
        """Return whether the grammar allows `token` next. End tokens are allowed where the grammar can end."""
        text = self._last_bytes + self._vocab.piece(token)
        if any(nul in text for nul in OVERLONG_NULS):
            return False
        self._single["id"] = token
        return bool(self._apply(self._single)[0])

    def allowed_mask(self, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Return for each of `tokens`, shape (n,), whether the grammar allows it next."""
        candidates = np.empty(len(tokens), TOKEN_DATA)
        candidates["id"] = tokens
        return self._apply(candidates)

    def close(self) -> None:
        """Free the grammar. May be called twice."""
        self._close()

    def __repr__(self) -> str:
        return f"<Grammar after {self._n_accepted} tokens>"

    def _apply(self, candidates: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Return the mask of allowed candidates. llama.cpp sets the logits of the others to minus infinity."""
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
    """Raise `JobRejected` if the block takes more than `MAX_STEP_S` of processor time."""
    started_s = time.thread_time()
    yield
    elapsed_s = time.thread_time() - started_s
    if elapsed_s > MAX_STEP_S:
        message = f"the grammar took {elapsed_s:.1f} s for one token: make it less ambiguous"
        raise JobRejected(ErrorCode.INVALID_GRAMMAR, message)
