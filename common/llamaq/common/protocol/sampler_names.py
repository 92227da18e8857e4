"""The names of the samplers, in the forms that llama.cpp accepts."""

from __future__ import annotations

from typing import Any, Literal, get_args

SamplerName = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "infill", "temperature", "adaptive_p"
]
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)

DEFAULT_SAMPLERS: tuple[SamplerName, ...] = tuple(name for name in SAMPLERS if name != "infill")
"""The default order: that of llama.cpp, and adaptive-p, which is always last."""

LETTERS: dict[str, SamplerName] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "i": "infill",
    "t": "temperature",
    "a": "adaptive_p",
}
"""The letters of llama.cpp's `--sampler-seq`."""

_SHORT_NAMES: dict[str, SamplerName] = {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical": "typ_p",
    "typicalp": "typ_p",
}
_BY_NAME = {name.replace("_", ""): name for name in SAMPLERS} | _SHORT_NAMES


def read_samplers(value: Any) -> Any:
    """Return the names of samplers in their plain form.

    A value that is neither a text nor a list of texts is returned unchanged.

    Args:
        value: A list of names, one text of names with `;` or `,` between them, or one text of letters.

    Raises:
        ValueError: There is no sampler of a name.
    """
    if isinstance(value, str):
        if value and value not in _SHORT_NAMES and set(value) <= LETTERS.keys():
            return tuple(LETTERS[letter] for letter in value)
        value = [part.strip() for part in value.replace(",", ";").split(";") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        return value
    return tuple(map(_sampler_of, value))


def _sampler_of(name: str) -> SamplerName:
    found = _BY_NAME.get(name.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise ValueError(
            f"there is no sampler {name[:50]!r}: the samplers are {', '.join(SAMPLERS)}, and as letters "
            f"{''.join(LETTERS)}"
        )
    return found
