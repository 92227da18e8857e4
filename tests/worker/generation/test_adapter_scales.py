from __future__ import annotations

import pytest

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.queue_and_worker_state import LoraScale
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.generation.adapter_scales import AdapterScales

ADAPTERS = AdapterScales([LoraScale(name="style.gguf", scale=0.5), LoraScale(name="terms.gguf", scale=1)])


@pytest.mark.parametrize(
    ("lora", "scales"),
    [
        (None, None),
        ({}, (0.0, 0.0)),
        ({"style.gguf": 2}, (2, 0.0)),
        ({"1": 0.25}, (0.0, 0.25)),
        ({"0": 1, "terms.gguf": -1}, (1, -1)),
        ({"0": 0.5, "1": 1}, None),  # what all jobs have
    ],
)
def test_scales_are_read_by_name_and_by_number(lora: dict[str, float] | None, scales: tuple[float, ...] | None) -> None:
    assert ADAPTERS.resolve(lora) == scales


@pytest.mark.parametrize("name", ["2", "-1", "style", "1.0", ""])
def test_an_unknown_adapter_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(JobRejected, match=rf"lora: .* no adapter {name!r}.* are: 0 \(style.gguf\), 1 \(terms.gguf\)"):
        ADAPTERS.resolve({name: 1})
    with pytest.raises(JobRejected, match="its adapters are: none"):
        AdapterScales([]).resolve({name: 1})


def test_of_two_adapters_with_one_name_the_first_has_it() -> None:
    twins = AdapterScales([LoraScale(name="a.gguf", scale=1)] * 2)
    assert twins.resolve({"a.gguf": 3}) == (3, 0.0)
    assert twins.resolve({"1": 3}) == (0.0, 3)


def test_only_jobs_with_the_same_scales_and_salt_share_cells() -> None:
    scopes = [Scope(), Scope("salt")]
    adapted = [scope.with_adapters(scales) for scope in scopes for scales in ((1.0, 0.0), (0.0, 1.0))]
    assert len({scope.key for scope in scopes + adapted}) == 6
    assert adapted[0].key == Scope(public=5).with_adapters((1.0, 0.0)).key
    assert Scope(public=5).with_adapters((1.0, 0.0)).public == 0
