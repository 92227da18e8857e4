"""Backend sampling: the device finds the largest logits of each row, and only these are copied to the host.

llama.cpp can run a chain of samplers as a part of its compute graph, one chain for each sequence. Here each chain has
top-k twice, and the host finishes the draw with the samplers of the job.

The second top-k changes nothing but the memory of the result. The graph has the chains of all sequences, but only the
tokens of sequences that have a row are marked as results. llama.cpp may keep the memory plan of an earlier graph, in
which other sequences had rows (`ggml_gallocr_needs_realloc` compares sizes only). If tokens had no mark in that graph,
the plan gives their memory to the next chain as soon as the logits are computed from them. Nothing is computed from the
tokens of the second top-k, so no plan gives their memory away.

When a chain is added or removed, llama.cpp plans its graphs again before the next decode. This takes some milliseconds,
so a sequence keeps its chain until a job needs all logits, and stays without a chain until a job does not need them.

Each sequence has one row at most. If n_outputs_max_per_seq of llama.cpp 0.3.36 is above 1, it plans the memory of its
graph for other rows than it computes later, and the results of one sequence overwrite those of another.

If a micro-batch has a row of a sequence without a chain, llama.cpp copies all logits of all its rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaq.worker.core.job_parts import N_LARGEST
from llamaq.worker.engine import fast_calls
from llamaq.worker.engine.llama_bindings import Context

Logits: TypeAlias = npt.NDArray[np.float32]


class LargestLogits(NamedTuple):
    """The largest logits of a row, as views that are valid until the next decode."""

    tokens: npt.NDArray[np.int32]
    """The tokens, in any order."""
    logits: Logits
    """Their logits."""


class BackendSamplers:
    """The chains of one context. Not thread-safe.

    Args:
        context: The context.
        n_sequences: Number of sequences. Each gets a chain.
    """

    def __init__(self, context: Context, n_sequences: int) -> None:
        self._context = context
        self._n_largest = min(N_LARGEST, context.n_vocab)
        self._token_row: Any = ctypes.c_int32 * self._n_largest
        self._logit_row: Any = ctypes.c_float * self._n_largest
        self._chains: dict[int, Any] = {}
        """Maps the sequences with a chain to pointers to these chains."""
        for seq_id in range(n_sequences):
            self._add(seq_id)

    def prepare(self, seq_id: int, *, needs_all_logits: bool) -> None:
        """Add or remove the chain of a sequence, so that the next decode returns the logits that its job needs."""
        if needs_all_logits and seq_id in self._chains:
            self._remove(seq_id)
        elif not needs_all_logits and seq_id not in self._chains:
            self._add(seq_id)

    def works(self) -> bool:
        """Return whether the device has found the largest logits of the last decode, which had a row of sequence 0.

        A device that cannot run the chain computes the batch without it, and reports no error.
        """
        fast_calls.get_logits(self._context.pointer)  # waits
        return int(fast_calls.get_sampled_logits_count(self._context.pointer, -1)) == self._n_largest

    def rows(self, seq_ids: Sequence[int]) -> list[Logits | LargestLogits]:
        """Return what the last decode computed for each row.

        Args:
            seq_ids: The sequence of each row, in the order of the batch.
        """
        # This call also brings all rows into the order of the batch. llama.cpp does so only here.
        all_logits = self._context.logits(len(seq_ids))
        return [
            self._largest(row - len(seq_ids)) if seq_id in self._chains else all_logits[row]
            for row, seq_id in enumerate(seq_ids)
        ]

    def remove_all(self) -> None:
        """Remove all chains. Call it before the context is closed."""
        for seq_id in list(self._chains):
            self._remove(seq_id)

    def _largest(self, index: int) -> LargestLogits:
        """Return the largest logits of a row. The last row has the index -1."""
        tokens = fast_calls.get_sampled_candidates(self._context.pointer, index)
        logits = fast_calls.get_sampled_logits(self._context.pointer, index)
        return LargestLogits(
            np.frombuffer(self._token_row.from_address(tokens), np.int32),
            np.frombuffer(self._logit_row.from_address(logits), np.float32),
        )

    def _add(self, seq_id: int) -> None:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for _ in range(2):
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(self._n_largest))
        llama_cpp.llama_set_sampler(self._context.pointer, seq_id, chain)
        self._chains[seq_id] = chain

    def _remove(self, seq_id: int) -> None:
        llama_cpp.llama_set_sampler(self._context.pointer, seq_id, None)
        llama_cpp.llama_sampler_free(self._chains.pop(seq_id))

    def __repr__(self) -> str:
        return f"<BackendSamplers {len(self._chains)} sequences, {self._n_largest} logits a row>"
