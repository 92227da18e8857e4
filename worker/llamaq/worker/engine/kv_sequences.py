"""KV memory from the outside: sequences are shared, cut, saved and loaded, as far as their kind of memory can.

                            cut in the middle   saved in parts   a copy
    attention, one pool     yes                 yes              shares cells
    attention, streams      yes                 no               is made at the next decode
    window without history  no                  no               as above; whole sequences only
    recurrent, hybrid       no                  no               as above; whole sequences only

Every success that llama.cpp reports is checked by positions, because it proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from llamaq.common.errors import EngineError
from llamaq.worker.core.kv_data import Allocate, Data, no_buffer
from llamaq.worker.engine.llama_bindings import Context, Model
from llamaq.worker.engine.state_format import SavedPart, SavedState, allot


class KvSequences:
    """All sequences of one context. Where parts can be saved, the last one is scratch: it is empty between calls."""

    def __init__(self, model: Model, context: Context) -> None:
        self._context = context
        self._is_recurrent = model.is_recurrent
        self._n_swa = model.n_swa
        self._has_streams = not context.kv_unified and not model.is_purely_recurrent
        self.can_cut = not model.is_recurrent and (not model.n_swa or context.swa_full)
        self.in_blocks = self.can_cut and context.kv_unified and context.has_scratch_sequence
        self.n_sequences = context.n_seq_max - 1 if self.in_blocks else context.n_seq_max
        self.cells_per_sequence = context.cells_per_sequence
        self.isolated: set[int] = set()
        """Sequences that the engine decodes in a batch of their own, because a failed batch cost them their cells."""
        self._scratch = context.n_seq_max - 1

    def holds(self, seq_id: int, n_tokens: int) -> bool:
        """Whether the sequence has exactly the first `n_tokens` positions, as far as its layers need them."""
        last = self._context.last_position(seq_id)
        if last != n_tokens - 1:
            return False
        if self._is_recurrent:
            # A hybrid memory says the smaller last position of its two parts, and the larger first one: that of its
            # state. A state that is further on than the attention cells is seen by the first alone.
            return self._context.first_position(seq_id) == last
        return not self._n_swa or self._context.first_position(seq_id) <= max(0, n_tokens - self._n_swa)

    def remove(self, seq_id: int) -> None:
        """Empty a sequence, also one that is empty."""
        self.isolated.discard(seq_id)
        self.cut(seq_id, 0)

    def cut(self, seq_id: int, n_tokens: int) -> int:
        """Keep the first `n_tokens` cells; returns how many are held then, 0 where it cannot be cut there."""
        self._context.remove(seq_id, n_tokens)
        if self.holds(seq_id, n_tokens):
            return n_tokens
        self._context.remove(seq_id, 0)
        return 0

    def copy(self, source: int, target: int, n_tokens: int) -> int:
        """Give the empty sequence `target` the first `n_tokens` cells of `source`; returns how many it holds then.

        That is 0 where this memory cannot be shared there: a recurrent state anywhere but at its end, a window that
        has moved on. `source` may go at once.
        """
        if not 1 <= n_tokens <= self._context.last_position(source) + 1:
            return 0
        if self._has_streams:
            self._context.copy_stream(source, target)
        else:
            self._context.share(source, target, 0, n_tokens)
        return n_tokens if self.holds(target, n_tokens) else self.cut(target, n_tokens)

    def save(self, seq_id: int, start: int, end: int, allocate: Allocate = no_buffer) -> Data:
        """The cells [start, end) of a sequence; all that it holds where memory is not saved in parts.

        Raises `EngineError` when it does not hold them, or llama.cpp refuses.
        """
        if not 0 <= start < end:
            raise ValueError(f"no cells are in [{start}, {end})")
        if any(seq_id == target for _, target in self._context.waiting_copies):
            self._make_copies(self._empty_sequence())
        if self.in_blocks:
            return self._save_parts(seq_id, start, end, allocate)
        if start or not self.holds(seq_id, end):
            raise EngineError(f"sequence {seq_id} can only be saved whole, and does not hold [{start}, {end}) exactly")
        return self._save_whole(seq_id, end, allocate)

    def load(self, seq_id: int, start: int, end: int, data: Data, first: int) -> bool:
        """Append the cells [start, end) of `data`, which `save` made from `first` on, to the `start` cells held.

        False when there is no room or the data are not right; the sequence is then as before, or empty.
        """
        saved = SavedState.parse(data, is_recurrent=self._is_recurrent)
        if saved is None or saved.start != first or not first <= start < end <= saved.end:
            return False
        if not self.holds(seq_id, start):
            return False
        if self.in_blocks:
            return self._load_parts(seq_id, start, end, saved)
        return start == first == 0 and self._load_whole(seq_id, end, saved)

    # ---- saving

    def _borders(self, start: int, end: int) -> list[tuple[int, int]]:
        """Parts that lie in one window each: of a longer one llama.cpp leaves out what its end cannot see."""
        step = self._n_swa or end
        inner = range((start // step + 1) * step, end, step)
        return list(pairwise([start, *inner, end]))

    @contextmanager
    def _part(self, seq_id: int, start: int, end: int) -> Iterator[int]:
        """A sequence that has the cells [start, end) of the given one and no others."""
        self._context.share(seq_id, self._scratch, start, end)
        try:
            if not self._spans(self._scratch, start, end):
                raise EngineError(f"sequence {seq_id} does not hold all of [{start}, {end})")
            yield self._scratch
        finally:
            self._context.remove(self._scratch, 0)

    def _save_parts(self, seq_id: int, start: int, end: int, allocate: Allocate) -> Data:
        borders, sizes = self._borders(start, end), []
        for border in borders:
            with self._part(seq_id, *border) as part:
                sizes.append(self._context.state_size(part))
        data, addresses = allot(borders, sizes, allocate)
        for border, address, size in zip(borders, addresses, sizes, strict=True):
            with self._part(seq_id, *border) as part:
                self._write(part, address, size)
        return data

    def _save_whole(self, seq_id: int, end: int, allocate: Allocate) -> Data:
        size = self._context.state_size(seq_id)
        data, [address] = allot([(0, end)], [size], allocate)
        self._write(seq_id, address, size)
        return data

    def _write(self, seq_id: int, address: int, size: int) -> None:
        if self._context.write_state(seq_id, address, size) != size:
            raise EngineError(f"llama.cpp cannot save sequence {seq_id}; its log says why")

    # ---- loading

    def _load_parts(self, seq_id: int, start: int, end: int, saved: SavedState) -> bool:
        for part in saved.parts:
            if start < part.end and part.start < end and not self._append(seq_id, start, end, part):
                self.cut(seq_id, start)
                return False
        return True

    def _append(self, seq_id: int, start: int, end: int, part: SavedPart) -> bool:
        """Read a part into scratch, and share what is wanted of it."""
        end = min(end, part.end)
        try:
            if self._read(self._scratch, part) and self._spans(self._scratch, part.start, part.end):
                self._context.share(self._scratch, seq_id, max(start, part.start), end)
        finally:
            self._context.remove(self._scratch, 0)
        return self.holds(seq_id, end)

    def _load_whole(self, seq_id: int, end: int, saved: SavedState) -> bool:
        if len(saved.parts) != 1 or (end < saved.end and not self.can_cut):
            return False
        if any(seq_id in copy for copy in self._context.waiting_copies):
            self._make_copies(seq_id)
        is_read = self._read(seq_id, saved.parts[0]) and self.holds(seq_id, saved.end)
        if is_read and (end == saved.end or self.cut(seq_id, end)):
            return True
        self._context.remove(seq_id, 0)
        return False

    def _read(self, seq_id: int, part: SavedPart) -> bool:
        return self._context.read_state(seq_id, part.address, part.n_bytes) == part.n_bytes

    def _spans(self, seq_id: int, start: int, end: int) -> bool:
        return (self._context.first_position(seq_id), self._context.last_position(seq_id)) == (start, end - 1)

    # ---- copies between streams

    def _make_copies(self, empty: int) -> None:
        """Have the copies made that wait for a decode, by decoding a token in an empty sequence."""
        batch = self._context.batch
        batch.clear()
        batch.add_run([0], 0, empty, wants_logits=False)
        status = self._context.decode()
        self._context.remove(empty, 0)
        if self._context.waiting_copies:
            raise EngineError(f"llama_decode returned {status} before it copied sequences")

    def _empty_sequence(self) -> int:
        for seq_id in range(self._context.n_seq_max):
            if self._context.last_position(seq_id) < 0:
                return seq_id
        raise EngineError("a copied sequence can be saved only after the next batch when no sequence is empty")
