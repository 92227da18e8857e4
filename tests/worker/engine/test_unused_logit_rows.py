from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from llamaq.worker.engine import fast_calls
from llamaq.worker.engine.llama_bindings import LOGIT_BYTES, SUCCESS, Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.engine.unused_logit_rows import return_unused_rows

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep the pages")

N_SEQUENCES = 64


def n_pages_in_memory(address: int, n_bytes: int) -> int:
    """Return how many of the pages that are wholly in the range are in memory."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    n_pages = (address + n_bytes - start) // mmap.PAGESIZE
    states = (ctypes.c_ubyte * n_pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(n_pages * mmap.PAGESIZE), states) == 0
    return sum(state & 1 for state in states)


def test_pages_leave_the_memory_and_are_zeros_afterwards() -> None:
    with mmap.mmap(-1, 8 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(len(memory))
        first = ctypes.c_ubyte.from_buffer(memory)
        address = ctypes.addressof(first)
        assert n_pages_in_memory(address, len(memory)) == 8
        return_unused_rows(address + 1, len(memory) - 2)  # the first and the last page are not wholly in the range
        assert n_pages_in_memory(address, len(memory)) == 2
        del first
        assert memory[:] == bytes(len(memory))


def test_nothing_is_done_without_logits() -> None:
    return_unused_rows(None, 10 * mmap.PAGESIZE)


@pytest.mark.cpu  # the driver of a GPU manages the memory
def test_a_context_has_only_the_rows_in_memory_that_were_decoded(demo_model: Path) -> None:
    model = Model(demo_model, ModelOptions())
    context = Context(model, ContextOptions(256, 64, 64, N_SEQUENCES, 1, 1))
    address = fast_calls.get_logits(context.pointer)
    row_pages = -(-context.n_vocab * LOGIT_BYTES // mmap.PAGESIZE)
    assert n_pages_in_memory(address, N_SEQUENCES * context.n_vocab * LOGIT_BYTES) == 0
    context.batch.add_decode_tokens([1, 2], [0, 0], [0, 1])
    assert context.decode() == SUCCESS
    assert fast_calls.get_logits(context.pointer) == address
    assert context.logits(2).any(axis=1).all()
    assert n_pages_in_memory(address, N_SEQUENCES * context.n_vocab * LOGIT_BYTES) <= 2 * row_pages
    context.close()
    model.close()
