"""llama.cpp's own samplers, and logits to compare them with ours."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data of llama.cpp."""


class LlamaSampler:
    """One sampler of llama.cpp, which keeps its state from draw to draw."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._pointer, token)

    def apply(self, logits: Mapping[int, float], *, with_masked: bool = False) -> tuple[dict[int, float], int]:
        """Return the logits of the tokens that the sampler keeps, by token id, and the token that it selects.

        Args:
            logits: The logits of the candidates by token id.
            with_masked: Whether to return the tokens with the logit minus infinity, too.
        """
        candidates = np.zeros(len(logits), TOKEN_DATA)
        candidates["id"] = list(logits)
        candidates["logit"] = list(logits.values())
        array = llama_cpp.llama_token_data_array(
            candidates.ctypes.data_as(llama_cpp.llama_token_data_p), len(candidates), -1, False
        )
        llama_cpp.llama_sampler_apply(self._pointer, ctypes.byref(array))
        # A sampler may move the start of the array, as XTC does.
        moved = ctypes.cast(array.data, ctypes.c_void_p).value or 0
        start = (moved - candidates.ctypes.data) // TOKEN_DATA.itemsize
        remaining = candidates[start : start + array.size]
        selected = int(remaining[array.selected]["id"]) if array.selected >= 0 else -1
        kept = {int(each["id"]): float(each["logit"]) for each in remaining if with_masked or each["logit"] > -np.inf}
        return kept, selected

    def reset(self) -> None:
        llama_cpp.llama_sampler_reset(self._pointer)

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._pointer)


def llama_chain(logits: Logits, samplers: Sequence[Any], history: Sequence[int] = ()) -> dict[int, float]:
    """Apply samplers of llama.cpp. Return the logits of the tokens that they keep, by token id.

    Typical sampling gets no masked tokens: with them, its entropy is not a number.
    """
    kept = dict(enumerate(logits.tolist()))
    for pointer in samplers:
        sampler = LlamaSampler(pointer)
        sampler.accept(history)
        if llama_cpp.llama_sampler_name(pointer) == b"typical":  # without effect, it is "?typical"
            kept = _unmasked(kept)
        kept, _ = sampler.apply(kept, with_masked=True)  # the next sampler may count them
        sampler.close()
    return _unmasked(kept)


def _unmasked(logits: Mapping[int, float]) -> dict[int, float]:
    return {token: logit for token, logit in logits.items() if logit > -np.inf}


def llama_dry(
    vocab: Any, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Sequence[str]
) -> Any:
    """Return DRY of llama.cpp for a llama_vocab."""
    texts = (ctypes.c_char_p * len(breakers))(*[text.encode() for text in breakers])
    return llama_cpp.llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n, texts, len(breakers))


def llama_bias(n_vocab: int, bias: Mapping[int, float]) -> Any:
    items = (llama_cpp.llama_logit_bias * len(bias))(*[llama_cpp.llama_logit_bias(*item) for item in bias.items()])
    return llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(bias), items)


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def away_from(values: npt.NDArray[Any], border: float) -> bool:
    """Return whether no value is so close to the border that a rounding error could move it to the other side."""
    return bool(np.abs(values - border).min() > 1e-4)


def random_logits(n: int, seed: int, spread: float = 2.5) -> Logits:
    return (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)
