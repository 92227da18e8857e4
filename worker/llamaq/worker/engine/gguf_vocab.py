"""Extracts the vocabulary of a GGUF file: the header and all metadata, without tensors.

A producer loads the result into llama.cpp with `vocab_only`. So it can tokenize like the worker, without the model's
weights. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llamaq.common.errors import ModelError
from llamaq.worker.metadata_override import MetadataOverride

MAX_BLOB_BYTES = 64 * 1024 * 1024
"""Upper bound on the bytes of header and metadata."""
MAX_KEYS = 65_536

_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of keys
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_VERSIONS = (2, 3)
_UINT16, _STRING, _ARRAY = 2, 8, 9
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""For each type of a GGUF file that is neither a text nor an array: the letter of `struct`."""
_TYPE_NAMES = {**dict.fromkeys((0, 1, 2, 3, 4, 5, 10, 11), "int"), 6: "float", 12: "float", 7: "bool", _STRING: "str"}
"""For each type of a GGUF file: the type of an override that can replace it."""
_TYPE_IF_NEW = {"int": 4, "float": 6, "bool": 7, "str": _STRING}
"""The types that llama.cpp expects for most keys, for keys that the file does not have."""
_SPLIT_INDEX, _SPLIT_COUNT = b"split.no", b"split.count"
_TEMPLATE = b"tokenizer.chat_template"
_CLASSIFIER_TENSORS = (b"cls.weight", b"cls.output.weight")
_POSITIONS_TENSOR = b"position_embd.weight"
_LONG_FACTORS_TENSOR = b"rope_factors_long.weight"
MAX_TENSOR_INFO_BYTES = 128
"""Upper bound on the bytes of a tensor's name, shape, type and offset: a name has at most 64."""


def extract_vocab(path: Path, chat_template: str | None = None, override_kv: Sequence[MetadataOverride] = ()) -> bytes:
    """Return the header and the metadata of a GGUF file, as a GGUF file without tensors.

    Args:
        path: The model file. If the model is split into several files: the first file.
        chat_template: Replaces the chat template of the model.
        override_kv: Values that replace metadata of the file.

    Raises:
        ModelError: The file cannot be read, is not a GGUF file, or is not the first file of a split model; or the file
            has a value of another type than an override.
    """
    with _opened(path) as metadata:
        values = {override.key.encode(): metadata.encode(override) for override in override_kv}
        if chat_template is not None:
            values[_TEMPLATE] = _TYPE.pack(_STRING) + _string(chat_template.encode())
        return metadata.without_tensors(values)


def has_classifier(path: Path) -> bool:
    """Return whether the model has a classification head, which scores documents. True if the model is split.

    Raises:
        ModelError: As in `extract_vocab`.
    """
    with _opened(path) as metadata:
        return metadata.is_split or any(metadata.has_tensor(name) for name in _CLASSIFIER_TENSORS)


def has_position_table(path: Path) -> bool:
    """Return whether the model has a learned vector for each position, like BERT and GPT-2, instead of RoPE.

    Such a model has no vectors beyond its training context: llama.cpp ends the process at such a position.

    Args:
        path: The model file. If the model is split into several files: the first file, which has the input tensors.

    Raises:
        ModelError: As in `extract_vocab`.
    """
    with _opened(path) as metadata:
        return metadata.has_tensor(_POSITIONS_TENSOR)


def has_long_rope_factors(path: Path) -> bool:
    """Return whether the model has RoPE factors for contexts longer than its original one. True if the model is split.

    Raises:
        ModelError: As in `extract_vocab`.
    """
    with _opened(path) as metadata:
        return metadata.is_split or metadata.has_tensor(_LONG_FACTORS_TENSOR)


@contextmanager
def _opened(path: Path) -> Iterator[_Metadata]:
    """Read the metadata of a GGUF file, which stays open until the end of the block. Raises `ModelError`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Metadata(data, path)
    except (OSError, ValueError) as exc:  # mmap raises a ValueError for an empty file
        raise ModelError(f"cannot read {path}: {exc}") from exc


class _Entry(NamedTuple):
    """A key and its value in the file."""

    start: int
    end: int
    kind: int
    """Type of the value."""


class _Metadata:
    """The header and the metadata of a GGUF file. They are read once: each value is skipped by its length.

    Args:
        data: The file.
        path: Its path, for error messages.

    Raises:
        ModelError: It is not a GGUF file, it ends too early, or it is not the first file of a split model.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._end = min(len(data), MAX_BLOB_BYTES)
        self._offset = _HEADER.size
        """Where the next value begins; after all values have been read: where the metadata end."""
        self._split_count_offset: int | None = None
        self._entries = dict[bytes, _Entry]()
        if data[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file")
        try:
            self._magic, self._version, self._n_tensors, self._n_keys = _HEADER.unpack_from(data, 0)
            if self._version not in _VERSIONS:
                raise ModelError(f"{path} is not a GGUF file of version 2 or 3")
            if self._n_keys > MAX_KEYS:
                raise ModelError(f"{path} has {self._n_keys} metadata keys, more than {MAX_KEYS}")
            for _ in range(self._n_keys):
                self._skip_key()
        except struct.error as exc:
            raise ModelError(
                f"{path} ends inside its metadata, or its metadata have more than {MAX_BLOB_BYTES} bytes"
            ) from exc

    def without_tensors(self, values: Mapping[bytes, bytes]) -> bytes:
        """Return a GGUF file with these metadata and no tensor.

        Args:
            values: Values that replace those of their keys, or are added. Each begins with its type.
        """
        blob = bytearray(self._data[: self._offset])
        if self._split_count_offset is not None:
            struct.pack_into("<H", blob, self._split_count_offset, 0)  # else llama.cpp opens the model's other files
        replaced = [self._entries[key] for key in values if key in self._entries]
        for entry in sorted(replaced, reverse=True):  # from the end, so that the earlier places stay valid
            del blob[entry.start : entry.end]
        for key, value in values.items():
            blob += _string(key) + value
        n_keys = self._n_keys - len(replaced) + len(values)
        _HEADER.pack_into(blob, 0, self._magic, self._version, 0, n_keys)
        return bytes(blob)

    def encode(self, override: MetadataOverride) -> bytes:
        """Return the type and the value of an override as a GGUF file has them. The type is that of the file's value.

        Raises:
            ModelError: The file has a value of another type, or one that is too small for the number.
        """
        entry = self._entries.get(override.key.encode())
        kind = _TYPE_IF_NEW[override.type_name] if entry is None else entry.kind
        if (expected := _TYPE_NAMES.get(kind)) != override.type_name:
            known = f"write {override.key}={expected}:VALUE" if expected else "arrays cannot be replaced"
            raise ModelError(f"--override-kv: {override}: {self._path} has a value of another type; {known}")
        if kind == _STRING:
            return _TYPE.pack(kind) + _string(str(override.value).encode())
        try:
            return _TYPE.pack(kind) + struct.pack(f"<{_SCALAR_CODES[kind]}", override.value)
        except struct.error as exc:
            raise ModelError(f"--override-kv: {override}: the number does not fit into the type of the key") from exc

    @property
    def is_split(self) -> bool:
        """Whether the model is split into several files."""
        return self._split_count_offset is not None

    def has_tensor(self, name: bytes) -> bool:
        """Return whether the file has a tensor of this name. The names follow the metadata."""
        end = min(self._offset + self._n_tensors * MAX_TENSOR_INFO_BYTES, len(self._data))
        return self._data.find(_LENGTH.pack(len(name)) + name, self._offset, end) >= 0

    # ---- reading

    def _skip_key(self) -> None:
        key_start = self._offset
        start = self._offset + _LENGTH.size
        self._skip_string()
        key = self._data[start : self._offset]
        kind = self._read(_TYPE)
        value_start = self._offset
        self._skip_value(kind)
        if kind == _UINT16 and key == _SPLIT_COUNT:
            self._split_count_offset = value_start
        elif kind == _UINT16 and key == _SPLIT_INDEX and struct.unpack_from("<H", self._data, value_start)[0] != 0:
            raise ModelError(
                f"{self._path} is not the first file of a split model: give the file whose name ends in -00001-of-…"
            )
        self._entries[key] = _Entry(key_start, self._offset, kind)

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array()
        else:
            self._skip_bytes(self._scalar_bytes(kind))

    def _skip_array(self) -> None:
        kind, n = self._read(_TYPE), self._read(_LENGTH)
        if kind != _STRING:
            self._skip_bytes(n * self._scalar_bytes(kind))
            return
        unpack, data, offset, end = _LENGTH.unpack_from, self._data, self._offset, self._end
        for _ in range(n):
            offset += 8 + unpack(data, offset)[0]
            if offset > end:
                raise struct.error("a value exceeds the end")
        self._offset = offset

    def _skip_string(self) -> None:
        self._skip_bytes(self._read(_LENGTH))

    def _skip_bytes(self, n: int) -> None:
        if self._offset + n > self._end:
            raise struct.error("a value exceeds the end")
        self._offset += n

    def _read(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self._data, self._offset)[0]
        self._skip_bytes(form.size)
        return value

    def _scalar_bytes(self, kind: int) -> int:
        try:
            return struct.calcsize(_SCALAR_CODES[kind])
        except KeyError:
            raise ModelError(f"{self._path} has a value of the unknown type {kind}") from None


def _string(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data
