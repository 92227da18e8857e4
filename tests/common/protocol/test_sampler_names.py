"""The samplers of llama.cpp are accepted by all names that llama.cpp knows."""

from __future__ import annotations

import pytest

from llamaq.common.protocol.sampler_names import SAMPLERS, read_samplers


@pytest.mark.parametrize(
    ("value", "samplers"),
    [
        ("kpt", ("top_k", "top_p", "temperature")),
        ("temp", ("temperature",)),
        ("typ", ("typ_p",)),
        ("top_k;typical;temp", ("top_k", "typ_p", "temperature")),
        ("top-k,nucleus", ("top_k", "top_p")),
        (["typical_p", "min-p"], ("typ_p", "min_p")),
        (";".join(SAMPLERS), tuple(SAMPLERS)),
    ],
)
def test_the_names_and_letters_of_llama_cpp_are_read(value: object, samplers: tuple[str, ...]) -> None:
    assert read_samplers(value) == samplers


def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ValueError, match="there is no sampler 'tempo': the samplers are penalties, "):
        read_samplers("tempo")
