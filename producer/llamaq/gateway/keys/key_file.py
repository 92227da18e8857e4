"""API keys in a file. The file contains only hashes of the keys, so a deployment can contain the file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llamaq.common.errors import InvalidRequest, InvalidSettings
from llamaq.gateway.keys.key_record import KeyRecord, hash_of, new_key

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 1024 * 1024
_RECORDS = TypeAdapter(dict[str, KeyRecord])


def read_keys(path: Path) -> dict[str, KeyRecord]:
    """Return the keys of a file by the SHA-256 of each.

    Raises:
        InvalidSettings: `llamaq keys add --file` has not written this file, or it cannot be read.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidSettings(f"keys_file: {path} has more than {MAX_FILE_BYTES} bytes")
        return _RECORDS.validate_json(path.read_bytes())
    except OSError as exc:
        raise InvalidSettings(f"keys_file: {path} cannot be read: {exc.strerror or exc}") from exc
    except ValidationError as exc:
        why = exc.errors()[0]["msg"]  # without the input and its place, which may be private
        raise InvalidSettings(f"keys_file: {path} was not written by `llamaq keys add --file`: {why}") from exc


def add_key(path: Path, **fields: Any) -> str:
    """Add a new key to a file, and return its secret, which cannot be read again.

    Args:
        path: The file. It is created if it does not exist.
        **fields: Fields of `KeyRecord`.

    Raises:
        InvalidRequest: A field is not valid, or there is a key of this name.
        InvalidSettings: The existing file is not a file of keys.
    """
    records = read_keys(path) if path.exists() else {}
    secret, record = new_key(**fields)
    if any(each.name == record.name for each in records.values()):
        raise InvalidRequest(f"name: {path} has a key {record.name!r}; remove it first, or use another name")
    records[hash_of(secret)] = record
    new = path.with_name(path.name + ".new")
    new.write_bytes(_RECORDS.dump_json(records, indent=1) + b"\n")
    new.replace(path)
    return secret


class KeyFile:
    """The keys of a file, which is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            InvalidSettings: The file is not a file of keys, or it cannot be read.
        """
        self._path = path
        self._read = self._version()
        self._records = read_keys(path)

    def __repr__(self) -> str:
        return f"<KeyFile {self._path} keys={len(self._records)}>"

    def records(self) -> dict[str, KeyRecord]:
        """Return the keys by their hashes. If the file is damaged now, return the keys that were read before."""
        version = self._version()
        if version != self._read:
            self._read = version
            try:
                self._records = read_keys(self._path)
            except InvalidSettings as exc:
                log.warning("key.file_not_read error=%s", exc)
        return self._records

    def _version(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
