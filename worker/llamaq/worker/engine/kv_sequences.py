"""Shares, cuts, saves and loads the sequences of a context, as far as its kind of KV memory permits.

    kind of KV memory                  cut at any token   saved in parts   copied in part
    attention, one pool of cells       yes                yes              yes
    attention, a stream per sequence   yes                no               yes
    sliding window without swa_full    no                 no               no
    recurrent, hybrid                  no                 no               no

With one pool of cells, a copy shares the cells of its source. With a stream per sequence, the next decode copies the
data of the cells.

After each call, the positions of the sequence are checked, because llama.cpp also returns success for calls that did
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from llamaq.common.errors import EngineError
from llamaq.worker.core.saved_cells import Allocate, SavedCells, no_buffer
from llamaq.worker.core.slot import Run
from llamaq.worker.engine.llama_bindings import Context, Model
from llamaq.worker.engine.state_format import SequenceState, StatePart, allocate_state
from llamaq.worker.engine.swa_guards import SwaGuards


class KvSequences:
    """All sequences of one context; implements `SlotStateOps`. Not thread-safe.

    Attributes:
        can_cut: Whether a sequence can be cut, and shared, at any token.
        can_remove_draft: Whether the last tokens of a sequence can be removed after they were decoded, and the sequence
            is then as it was before. False also if a sliding window may lose cells that only later tokens do not need.
        can_save_parts: Whether parts of a sequence can be saved, and appended to a sequence that is not empty. If so,
            the last sequence of the context is a scratch sequence, which is empty between calls. With a sliding window,
            half of the other sequences are guards, see `SwaGuards`.
        can_cut_saved: Whether saved state can also be loaded up to an earlier token. False also if whole sequences are
            saved and there is a sliding window: llama.cpp saves only the cells that the next token needs.
        n_sequences: Number of sequences that callers may use. Their ids are 0 to `n_sequences - 1`.
        cells_per_sequence: Upper bound on the cells of one sequence.
        isolated: Maps a sequence that lost its cells in a failed batch to its run at that time. The engine decodes this
            run in a batch of its own. A later run that takes over the sequence is decoded together with others.
            `remove` also removes the sequence from this map.
    """

    def __init__(self, model: Model, context: Context) -> None:
        self._context = context
        self._is_recurrent = model.is_recurrent
        self._n_swa = model.n_swa
        self._has_streams = not context.kv_unified and not model.is_purely_recurrent
        self.can_cut = not model.is_recurrent and (not model.n_swa or context.swa_full)
        self.can_save_parts = self.can_cut and context.kv_unified and context.has_scratch_sequence
        self.n_sequences = context.n_seq_max - 1 if self.can_save_parts else context.n_seq_max
        self._guards: SwaGuards | None = None
        if self.can_save_parts and model.n_swa and self.n_sequences > 1:
            self.n_sequences //= 2
            self._guards = SwaGuards(context, model.n_swa, offset=self.n_sequences)
        self.can_cut_saved = self.can_save_parts or (self.can_cut and not model.n_swa)
        self.can_remove_draft = self.can_cut and (not model.n_swa or self._guards is not None)
        self.cells_per_sequence = context.cells_per_sequence
        self.isolated: dict[int, Run] = {}
        self._scratch = context.n_seq_max - 1

    def holds(self, seq_id: int, n_tokens: int) -> bool:
        """Return whether `n_tokens - 1` is the last position, and all positions that the layers need are in memory."""
        last = self._context.last_position(seq_id)
        if last != n_tokens - 1:
            return False
        if self._is_recurrent:
            # A hybrid memory has attention cells and a recurrent state. For the last position, llama.cpp returns the
            # smaller of both last positions. For the first position, it returns the larger of both, which is the
            # position of the state. So if the state is ahead of the attention cells, only the first position shows
            # this.
            return self._context.first_position(seq_id) == last
        first_needed = max(0, n_tokens + 1 - self._n_swa)  # the next token attends to `n_swa` tokens, itself included
        return not self._n_swa or self._context.first_position(seq_id) <= first_needed

    @property
    def has_guards(self) -> bool:
        """Whether `keep_cells` has something to do."""
        return self._guards is not None

    def keep_cells(self, seq_id: int, n_tokens: int) -> None:
        """Keep the cells of a sequence that now holds `n_tokens`, also those that have left the sliding window.

        Called after each decode.
        """
        if self._guards is not None:
            self._guards.extend(seq_id, n_tokens)

    def remove(self, seq_id: int) -> None:
        """Remove all cells of a sequence. The sequence may already be empty."""
        self.isolated.pop(seq_id, None)
        self.cut(seq_id, 0)

    def clear(self) -> None:
        """Remove all cells of all sequences, and overwrite the data of the cells."""
        self.isolated.clear()
        if self._guards is not None:
            self._guards.clear()
        self._context.clear(with_data=True)

    def cut(self, seq_id: int, n_tokens: int) -> int:
        """Remove the cells of a sequence after the first `n_tokens`.

        Returns:
            The number of cells that the sequence holds afterwards: `n_tokens`, or 0 if it cannot be cut there.
        """
        if self._guards is not None:
            self._guards.cut(seq_id, n_tokens)
        self._context.remove(seq_id, n_tokens)
        if self.holds(seq_id, n_tokens):
            return n_tokens
        return self.cut(seq_id, 0) if n_tokens else 0

    def copy(self, source: int, target: int, n_tokens: int) -> int:
        """Copy the first `n_tokens` cells of `source` to the empty sequence `target`.

        `source` may be changed or removed immediately afterwards.

        Returns:
            The number of cells that `target` holds afterwards. The number is 0 if these cells cannot be copied: the
            recurrent state already includes later tokens, or some of the cells have left the sliding window.
        """
        if not 1 <= n_tokens <= self._context.last_position(source) + 1:
            return 0
        if self._has_streams:  # llama_memory_seq_cp aborts on a partial copy between streams
            self._context.copy_stream(source, target)
        else:
            self._context.share(source, target, 0, n_tokens)
        n_held = n_tokens if self.holds(target, n_tokens) else self.cut(target, n_tokens)
        self.keep_cells(target, n_held)
        return n_held

    def wait(self) -> None:
        """Wait until the device has computed all batches."""
        self._context.synchronize()

    def save(self, seq_id: int, start: int, end: int, allocate: Allocate = no_buffer) -> SavedCells:
        """Return the state of the cells [start, end) of a sequence.

        Args:
            seq_id: The sequence.
            start: The first cell. Must be 0 unless `can_save_parts`.
            end: The cell after the last one. Must be the length of the sequence unless `can_save_parts`.
            allocate: Provides the memory for the state.

        Raises:
            EngineError: The sequence does not hold the cells, or llama.cpp cannot save them.
        """
        if not 0 <= start < end:
            raise ValueError(f"there are no cells in [{start}, {end})")
        if any(seq_id == target for _, target in self._context.pending_copies):
            original = self._original_of(seq_id)
            if original is not None and self.holds(original, end) and self.holds(seq_id, end):
                seq_id = original  # no sequence may be empty now
            else:
                self._finish_copies(self._empty_sequence())
        if self.can_save_parts:
            return self._save_parts(seq_id, start, end, allocate)
        if start or not self.holds(seq_id, end):
            raise EngineError(f"sequence {seq_id} can only be saved whole, and does not hold [{start}, {end}) exactly")
        return self._save_whole(seq_id, end, allocate)

    def load(self, seq_id: int, start: int, end: int, data: SavedCells, first: int) -> bool:
        """Append the cells [start, end) of saved state to a sequence that holds `start` cells.

        Args:
            seq_id: The sequence.
            start: The first cell to load. Must be 0 unless `can_save_parts`.
            end: The cell after the last cell to load.
            data: The state that `save` returned.
            first: The first cell in `data`.

        Returns:
            False if there is no room, or the data are not a state with these cells. The sequence is then unchanged, or
            empty.
        """
        saved = SequenceState.parse(data, is_recurrent=self._is_recurrent)
        if saved is None or saved.start != first or not first <= start < end <= saved.end:
            return False
        if not self.holds(seq_id, start):
            return False
        if self.can_save_parts:
            return self._load_parts(seq_id, start, end, saved)
        return start == first == 0 and self._load_whole(seq_id, end, saved)

    # ---- saving

    def _part_ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split [start, end) into ranges that are not longer than the sliding window.

        From a longer range, llama.cpp saves only the cells in the window of the last cell.
        """
        step = self._n_swa or end
        inner = range((start // step + 1) * step, end, step)
        return list(pairwise([start, *inner, end]))

    @contextmanager
    def _scratch_with(self, seq_id: int, start: int, end: int) -> Iterator[int]:
        """Share the cells [start, end) of `seq_id` with the scratch sequence in the `with` block. Yields its id."""
        self._context.share(seq_id, self._scratch, start, end)
        try:
            if not self._spans(self._scratch, start, end):
                raise EngineError(f"sequence {seq_id} does not hold all of [{start}, {end})")
            yield self._scratch
        finally:
            self._context.remove(self._scratch, 0)

    def _save_parts(self, seq_id: int, start: int, end: int, allocate: Allocate) -> SavedCells:
        ranges, sizes = self._part_ranges(start, end), []
        for cells in ranges:
            with self._scratch_with(seq_id, *cells) as scratch:
                sizes.append(self._context.state_size(scratch))
        data, addresses = allocate_state(ranges, sizes, allocate)
        for cells, address, size in zip(ranges, addresses, sizes, strict=True):
            with self._scratch_with(seq_id, *cells) as scratch:
                self._write(scratch, address, size)
        return data

    def _save_whole(self, seq_id: int, end: int, allocate: Allocate) -> SavedCells:
        size = self._context.state_size(seq_id)
        data, [address] = allocate_state([(0, end)], [size], allocate)
        self._write(seq_id, address, size)
        return data

    def _write(self, seq_id: int, address: int, size: int) -> None:
        if self._context.write_state(seq_id, address, size) != size:
            raise EngineError(f"llama.cpp cannot save sequence {seq_id}; see its log for the reason")

    # ---- loading

    def _load_parts(self, seq_id: int, start: int, end: int, saved: SequenceState) -> bool:
        for part in saved.parts:
            if start < part.end and part.start < end and not self._append(seq_id, start, end, part):
                self.cut(seq_id, start)
                return False
        self.keep_cells(seq_id, end)
        return True

    def _append(self, seq_id: int, start: int, end: int, part: StatePart) -> bool:
        """Load a part into the scratch sequence, and share the loaded cells in [start, end) with `seq_id`."""
        end = min(end, part.end)
        try:
            if self._read(self._scratch, part) and self._spans(self._scratch, part.start, part.end):
                self._context.share(self._scratch, seq_id, max(start, part.start), end)
        finally:
            self._context.remove(self._scratch, 0)
        return self.holds(seq_id, end)

    def _load_whole(self, seq_id: int, end: int, saved: SequenceState) -> bool:
        if len(saved.parts) != 1 or (end < saved.end and not self.can_cut):
            return False
        if any(seq_id in copy for copy in self._context.pending_copies):
            self._finish_copies(seq_id)
        is_read = self._read(seq_id, saved.parts[0]) and self.holds(seq_id, saved.end)
        if is_read and (end == saved.end or self.cut(seq_id, end)):
            return True
        self._context.remove(seq_id, 0)
        return False

    def _read(self, seq_id: int, part: StatePart) -> bool:
        return self._context.read_state(seq_id, part.address, part.n_bytes) == part.n_bytes

    def _spans(self, seq_id: int, start: int, end: int) -> bool:
        return (self._context.first_position(seq_id), self._context.last_position(seq_id)) == (start, end - 1)

    # ---- copies between streams

    def _original_of(self, seq_id: int) -> int | None:
        """Return the sequence from which the pending copies take the data of `seq_id`.

        Only a decode adds cells. So if this sequence still holds as many tokens as `seq_id`, their cells are equal.

        Returns:
            None if this sequence has become the target of a later copy.
        """
        overwritten: set[int] = set()
        for source, target in reversed(self._context.pending_copies):
            if target == seq_id:
                if source in overwritten:
                    return None
                seq_id = source
            overwritten.add(target)
        return seq_id

    def _finish_copies(self, empty: int) -> None:
        """Let llama.cpp execute its pending copies, by decoding one token in the sequence `empty`."""
        batch = self._context.batch
        batch.clear()
        batch.add_chunk([0], 0, empty, has_row=False)
        status = self._context.decode()
        self._context.remove(empty, 0)
        if self._context.pending_copies:
            raise EngineError(f"llama_decode returned {status} and did not copy the sequences")

    def _empty_sequence(self) -> int:
        for seq_id in range(self._context.n_seq_max):
            if self._context.last_position(seq_id) < 0:
                return seq_id
        raise EngineError("a copied sequence cannot be saved before the next batch, because no sequence is empty")
