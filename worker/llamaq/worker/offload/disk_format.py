"""A block's file: header, packed tokens, data, checksum.

    magic 8 | format 4 | 0 4 | fingerprint 32 | parent's name 32 | namespace's key 32 | start 8 | end 8 | data length 8
    tokens 4 * (end - start) | data | crc32 of all before 4

Numbers have the machine's byte order, as the data has. The file's name is the block's, which is a hash over what
decides where it belongs: a header that fits the name can be trusted before the data is read. The checksum is for torn
files and bad disks, not against somebody who can write to the folder; it is the fastest that Python has.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import zlib
from enum import StrEnum
from typing import BinaryIO

from llamaq.worker.core.kv_data import Data
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.blocks.block import FILE_BYTES, Block, StoredBlock, block_name
from llamaq.worker.offload.atomic_files import read_exactly, size_of

MAGIC = b"llamaqKV"
FORMAT = 1
HEADER = struct.Struct("=8sII32s32s32sQQQ")
CHECKSUM_BYTES = FILE_BYTES - HEADER.size


class Fault(StrEnum):
    """Why a file is not used."""

    FOREIGN = "foreign"
    """Not a block's file, or of another version of this format."""
    OTHER_FINGERPRINT = "other_fingerprint"
    """Of another model or other settings."""
    TORN = "torn"
    """Cut short or damaged."""
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    """The system does not let it be opened or read."""


def fingerprint_key(fingerprint: str) -> bytes:
    """The 32 bytes that stand for the fingerprint in files and in folders' names."""
    return hashlib.sha256(fingerprint.encode()).digest()


def block_header(block: Block, fingerprint: bytes) -> bytes:
    """What the file of this block begins with."""
    parent_name = block.parent.name if block.parent else b""
    fixed = HEADER.pack(
        MAGIC, FORMAT, 0, fingerprint, parent_name, block.namespace, block.start, block.end, block.n_bytes
    )
    return fixed + block.tokens


def checksum(*parts: Data) -> bytes:
    """What ends a file of these parts."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc.to_bytes(CHECKSUM_BYTES, sys.byteorder)


def read_header(file: BinaryIO, name: bytes, fingerprint: bytes, max_bytes: int) -> StoredBlock | Fault:
    """What the file called `name` says about its block, without its data. Reads at most `max_bytes`."""
    size = size_of(file)
    fixed = read_exactly(file, HEADER.size)
    if len(fixed) < HEADER.size:
        return Fault.TORN if MAGIC.startswith(fixed[: len(MAGIC)]) else Fault.FOREIGN
    magic, version, _, owner, parent_name, namespace, start, end, n_bytes = HEADER.unpack(fixed)
    if (magic, version) != (MAGIC, FORMAT):
        return Fault.FOREIGN
    if owner != fingerprint:
        return Fault.OTHER_FINGERPRINT
    if start >= end or size != FILE_BYTES + (end - start) * TOKEN_BYTES + n_bytes:
        return Fault.TORN
    if size > max_bytes:
        return Fault.TOO_LARGE
    tokens = read_exactly(file, (end - start) * TOKEN_BYTES)
    if block_name(parent_name, namespace, tokens) != name:
        return Fault.TORN
    return StoredBlock(name, parent_name, namespace, tokens, start, end, n_bytes, os.fstat(file.fileno()).st_mtime)


def read_data(file: BinaryIO, block: Block, fingerprint: bytes) -> bytes | Fault:
    """The data of the file of this block, verified against what is known of it and by its checksum."""
    if size_of(file) != block.file_bytes:
        return Fault.TORN
    header = block_header(block, fingerprint)
    if read_exactly(file, len(header)) != header:
        return Fault.TORN
    data = read_exactly(file, block.n_bytes)
    if len(data) != block.n_bytes or read_exactly(file, CHECKSUM_BYTES) != checksum(header, data):
        return Fault.TORN
    return data
