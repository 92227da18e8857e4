"""Values that replace metadata of a model's file: `--override-kv KEY=TYPE:VALUE`, as in llama.cpp's own programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

MAX_BYTES = 127
"""Longest key and longest text that a `llama_model_kv_override` can hold, in bytes of UTF-8."""
MAX_INT64 = 2**63 - 1
TYPES = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True, slots=True)
class MetadataOverride:
    """A key of a GGUF file and the value that replaces the one in the file."""

    key: str
    value: bool | int | float | str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the override in KEY=TYPE:VALUE. Raises ValueError with the reason if the text is not valid."""
        key, _, typed = text.partition("=")
        name, colon, value = typed.partition(":")
        if not key or not colon or name not in TYPES:
            raise ValueError(f"{text!r} is not KEY=TYPE:VALUE with one of the types {', '.join(TYPES)}")
        if max(len(key.encode()), len(value.encode())) > MAX_BYTES:
            raise ValueError(f"{key}: a key and a value have at most {MAX_BYTES} bytes")
        try:
            return cls(key, _parse_value(name, value))
        except ValueError:
            raise ValueError(f"{key}: {value!r} is not a valid {name}") from None

    @property
    def type_name(self) -> str:
        """The type of the value, as `parse` reads it."""
        return next(name for name, each in TYPES.items() if type(self.value) is each)

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={self.type_name}:{value}"


def _parse_value(type_name: str, text: str) -> bool | int | float | str:
    """Return the value of a text. Raises ValueError if it is not valid for the type."""
    match type_name:
        case "int":
            number = int(text)
            if abs(number) > MAX_INT64:
                raise ValueError(text)
            return number
        case "float":
            real = float(text)
            if not math.isfinite(real):
                raise ValueError(text)
            return real
        case "bool":
            if text not in ("true", "false"):
                raise ValueError(text)
            return text == "true"
    return text
