"""The format of a block's file: header, packed tokens, data, checksum.

The file has these fields, with their sizes in bytes:

    header     magic (8), format version (4), zeros (4), key of the fingerprint (32), name of the parent block (32),
               key of the namespace (32), first token (8), token after the last one (8), size of the data (8)
    tokens     4 for each token
    data       as given in the header
    checksum   crc32 of all preceding bytes (4)

Numbers and data have the byte order of the machine. The name of the file is the name of the block, which is a hash of
the parent's name, the namespace and the tokens. A header that matches the name can therefore be used before the data is
verified. The checksum detects torn files and disk errors. It does not detect changes by an attacker with write access
to the folder. crc32 is the fastest checksum in Python's standard library.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import zlib
from enum import StrEnum
from typing import BinaryIO

from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.kv_cache.blocks.block import FILE_BYTES, Block, BlockHeader, block_name
from llamaq.worker.offload.atomic_files import file_size, read_up_to

MAGIC = b"llamaqKV"
FORMAT = 1
HEADER = struct.Struct("=8sII32s32s32sQQQ")
CHECKSUM_BYTES = FILE_BYTES - HEADER.size


class Fault(StrEnum):
    """The reason why a file is not used."""

    FOREIGN = "foreign"
    """The file is not a block's file, or has another version of this format."""
    OTHER_FINGERPRINT = "other_fingerprint"
    """The file was written for another model or other settings."""
    TORN = "torn"
    """The file is truncated or damaged."""
    TOO_LARGE = "too_large"
    """The file is larger than the capacity of the disk tier."""
    UNREADABLE = "unreadable"
    """The operating system refuses to open or read the file."""


def fingerprint_key(fingerprint: str) -> bytes:
    """Return the 32-byte hash of a fingerprint, for headers and folder names."""
    return hashlib.sha256(fingerprint.encode()).digest()


def encode_header(block: Block, fingerprint: bytes) -> bytes:
    """Return the header and the tokens of the block's file."""
    parent_name = block.parent.name if block.parent else b""
    fixed = HEADER.pack(
        MAGIC, FORMAT, 0, fingerprint, parent_name, block.namespace, block.start, block.end, block.n_bytes
    )
    return fixed + block.tokens


def checksum(*parts: SavedCells) -> bytes:
    """Return the checksum of the parts. It is written at the end of the file."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc.to_bytes(CHECKSUM_BYTES, sys.byteorder)


def read_header(file: BinaryIO, name: bytes, fingerprint: bytes, max_bytes: int) -> BlockHeader | Fault:
    """Read and verify the header of a block's file, without its data.

    Args:
        file: The file, open at its beginning.
        name: The block's name, from the name of the file.
        fingerprint: The `fingerprint_key` of this worker.
        max_bytes: Upper bound on the size of the file. A larger file is `Fault.TOO_LARGE`.
    """
    size = file_size(file)
    fixed = read_up_to(file, HEADER.size)
    if len(fixed) < HEADER.size:
        return Fault.TORN if MAGIC.startswith(fixed[: len(MAGIC)]) else Fault.FOREIGN
    magic, version, _, file_fingerprint, parent_name, namespace, start, end, n_bytes = HEADER.unpack(fixed)
    if (magic, version) != (MAGIC, FORMAT):
        return Fault.FOREIGN
    if file_fingerprint != fingerprint:
        return Fault.OTHER_FINGERPRINT
    if start >= end or size != FILE_BYTES + (end - start) * TOKEN_BYTES + n_bytes:
        return Fault.TORN
    if size > max_bytes:
        return Fault.TOO_LARGE
    tokens = read_up_to(file, (end - start) * TOKEN_BYTES)
    if block_name(parent_name, namespace, tokens) != name:
        return Fault.TORN
    return BlockHeader(name, parent_name, namespace, tokens, start, end, n_bytes, os.fstat(file.fileno()).st_mtime)


def read_data(file: BinaryIO, block: Block, fingerprint: bytes) -> bytes | Fault:
    """Read the data of the block's file. Verify the header in the file against the block, and the checksum."""
    if file_size(file) != block.file_bytes:
        return Fault.TORN
    header = encode_header(block, fingerprint)
    if read_up_to(file, len(header)) != header:
        return Fault.TORN
    data = read_up_to(file, block.n_bytes)
    if len(data) != block.n_bytes or read_up_to(file, CHECKSUM_BYTES) != checksum(header, data):
        return Fault.TORN
    return data
