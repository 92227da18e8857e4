"""Returns to the system the memory of those rows of logits that no decode has written yet.

llama.cpp allocates a row of logits for every sequence of a context, also for those that hold cached prefixes and never
have logits, and fills all rows with zeros. So all rows are in memory: 44 MB with 73 sequences and 151,936 tokens. If
their pages are returned, the system provides pages of zeros at the first write to a row.
"""

from __future__ import annotations

import ctypes
import mmap
import sys


def return_unused_rows(address: int | None, n_bytes: int) -> None:
    """Return the pages of a buffer that has only zeros. Its contents do not change.

    Args:
        address: The address of the buffer, in ordinary memory of this process. None: nothing is done.
        n_bytes: The size of the buffer.
    """
    if not address or not sys.platform.startswith("linux"):  # other systems do not promise zeros afterwards
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        # An error means that the pages stay in memory, for example because they are locked.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
