"""The kinds of KV memory of llama.cpp, and what their tests compute and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.load_options import ContextOptions

Logits = npt.NDArray[np.float32]
MakeEngine = Callable[..., Engine]

OPTIONS = ContextOptions(n_ctx=1024, n_batch=128, n_ubatch=32, n_seq_max=4, n_threads=1, n_threads_batch=1)
NOISE = 0.02
"""Upper bound on how much the shape of a batch changes logits, as a share of their standard deviation."""
TAIL = [7, 300, 42]


@dataclass(frozen=True)
class Kind:
    """A model with memory options, and the expected `can_cut` and `can_save_parts`."""

    model: str
    kv_unified: bool = True
    swa_full: bool = True
    can_cut: bool = True

    @property
    def can_save_parts(self) -> bool:
        return self.can_cut and self.kv_unified

    @property
    def shape(self) -> tuple[str, bool]:
        """Identifies the format of a saved state. llama.cpp also loads another model's state if the format is equal."""
        model = "plain" if self.model == "grouped" else self.model
        return model, self.kv_unified or model == "recurrent"

    @property
    def options(self) -> ContextOptions:
        has_guards = self.model == "sliding" and self.can_save_parts
        n_seq_max = 7 if has_guards else 4  # three sequences for callers, their guards, and the scratch sequence
        return replace(OPTIONS, kv_unified=self.kv_unified, swa_full=self.swa_full, n_seq_max=n_seq_max)


KINDS = {
    "plain": Kind("plain"),
    "grouped": Kind("grouped"),
    "sliding": Kind("sliding"),
    "window": Kind("sliding", swa_full=False, can_cut=False),
    "recurrent": Kind("recurrent", can_cut=False),
    "hybrid": Kind("hybrid", can_cut=False),
    "plain streams": Kind("plain", kv_unified=False),
    "sliding streams": Kind("sliding", kv_unified=False),
    "window streams": Kind("sliding", kv_unified=False, swa_full=False, can_cut=False),
    "recurrent streams": Kind("recurrent", kv_unified=False, can_cut=False),
    "hybrid streams": Kind("hybrid", kv_unified=False, can_cut=False),
}
BLOCKS = [name for name, kind in KINDS.items() if kind.can_save_parts]
WHOLE = [name for name, kind in KINDS.items() if not kind.can_cut]
STREAMS = ["plain streams", "sliding streams", "window streams", "hybrid streams"]


def prompt(n: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 500, n).tolist()
    return tokens


def compute(engine: Engine, seq_id: int, tokens: Sequence[int]) -> Logits:
    """Decode the tokens that the sequence does not hold yet, and return the logits of the last one."""
    n_past = engine.context.last_position(seq_id) + 1
    batch = engine.context.batch
    for start in range(n_past, len(tokens), 50):
        end = min(start + 50, len(tokens))
        batch.clear()
        batch.add_chunk(tokens[start:end], start, seq_id, has_row=end == len(tokens))
        assert engine.context.decode() == 0
        engine.sequences.keep_cells(seq_id, end)
    logits: Logits = engine.context.logits(1)[0].copy()
    return logits


def fresh_logits(make_engine: MakeEngine, name: str, tokens: Sequence[int]) -> Logits:
    return compute(make_engine(name), 0, tokens)


def assert_close(logits: Logits, expected: Logits) -> None:
    assert np.abs(logits - expected).max() < NOISE * expected.std()


def assert_as_recomputed(make_engine: MakeEngine, name: str, tokens: Sequence[int], logits: Logits) -> None:
    """Compare the logits after `tokens` with those that a new engine computes."""
    assert_close(logits, fresh_logits(make_engine, name, tokens))


def lengths(engine: Engine, *seq_ids: int) -> list[int]:
    return [engine.context.last_position(seq_id) + 1 for seq_id in seq_ids]


def count_free_cells(engine: Engine) -> int:
    """Return the number of free cells, found by filling the memory."""
    batch, n = engine.context.batch, 0
    for size in (128, 64, 32, 16, 8, 4, 2, 1):
        while True:
            batch.clear()
            batch.add_chunk([1] * size, n, 0, has_row=False)
            if engine.context.decode():
                break
            n += size
    engine.sequences.remove(0)
    return n
