"""A `model` names a queue, a model or an adapter, in this order."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.worker_cards import make_card, make_heartbeat

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.queue_and_worker_state import LoraScale, Worker
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.model_names import NamedModel, Served, adapters_of, allowed_by, find_named, id_of, names_of

STYLE, TERMS, OFF = (
    LoraScale(name=f"{name}.gguf", scale=scale) for name, scale in (("style", 0.5), ("terms", 1), ("off", 0))
)


def worker_of(queue: str, *adapters: LoraScale, **card: Any) -> Worker:
    return make_heartbeat(make_card(queue=queue, lora=adapters, **card))


SERVED: Served = {
    "idle": (),
    "law": (worker_of("law", TERMS, OFF, model="base"), worker_of("law", TERMS, STYLE, model="base")),
    "prose": (worker_of("prose", STYLE, LoraScale(name="law.gguf", scale=1), LoraScale(name="base", scale=1)),),
    "texts": (worker_of("texts", LoraScale(name="query.gguf", scale=1), kind=JobKind.EMBEDDING),),
}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (None, NamedModel("own")),
        ("own", NamedModel("own")),
        ("idle", NamedModel("idle")),
        ("prose", NamedModel("prose")),
        ("base", NamedModel("law")),
        ("law", NamedModel("law")),
        ("terms", NamedModel("law", TERMS)),
        ("terms.gguf", NamedModel("law", TERMS)),
        ("style", NamedModel("law", STYLE)),
        ("law.gguf", NamedModel("prose", LoraScale(name="law.gguf", scale=1))),
        ("query", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_what_a_model_names(model: str | None, named: NamedModel | None) -> None:
    assert find_named(model, "own", SERVED) == named


def test_of_equal_adapters_that_of_the_own_queue_is_used() -> None:
    assert find_named("style", "prose", SERVED) == NamedModel("prose", STYLE)
    assert find_named("style.gguf", "prose", SERVED) == NamedModel("prose", STYLE)
    assert find_named("style", "texts", SERVED) == NamedModel("law", STYLE)


def test_a_named_adapter_is_used_alone_with_its_scale_or_with_1() -> None:
    assert NamedModel("law").job_options == {}
    assert NamedModel("law", STYLE).job_options == {"lora": {"style.gguf": 0.5}}
    assert NamedModel("law", OFF).job_options == {"lora": {"off.gguf": 1.0}}


def test_adapters_of_several_workers_are_listed_once() -> None:
    assert adapters_of(SERVED["law"]) == [TERMS, OFF, STYLE]
    assert adapters_of(SERVED["texts"]) == []
    assert adapters_of(()) == []


def test_the_name_of_a_file_takes_precedence_over_a_name_without_ending() -> None:
    short, long, empty = (LoraScale(name=name, scale=1) for name in ("plain", "plain.gguf", ".gguf"))
    served: Served = {"a": (worker_of("a", long, empty),), "b": (worker_of("b", short),)}
    assert find_named("plain", "own", served) == NamedModel("b", short)
    assert find_named("plain.gguf", "own", served) == NamedModel("a", long)
    assert find_named(".gguf", "own", served) == NamedModel("a", empty)
    assert find_named("", "own", served) is None


def test_the_id_of_a_model_names_it() -> None:
    names = names_of("own", SERVED)
    listed = [NamedModel(queue) for queue in SERVED]
    listed += [NamedModel(queue, adapter) for queue in SERVED for adapter in adapters_of(SERVED[queue])]
    ids = {named: id_of(named, names) for named in listed}
    assert all(name is None or find_named(name, "own", SERVED) == named for named, name in ids.items())
    assert [named for named, name in ids.items() if name is None] == [
        NamedModel("prose", STYLE),  # a queue with an earlier name has this adapter too
        NamedModel("prose", LoraScale(name="base", scale=1)),  # the model of a queue has this name
    ]
    assert id_of(NamedModel("law", TERMS), names) == "terms"
    assert id_of(NamedModel("prose", LoraScale(name="law.gguf", scale=1)), names) == "law.gguf"  # `law` is a queue


def test_the_models_of_an_api_key_are_those_of_its_queues() -> None:
    key = KeyRecord(name="bob", queues=("prose", "absent"), created_ms=0)
    assert allowed_by(key, SERVED) == {"prose": SERVED["prose"]}
    assert allowed_by(KeyRecord(name="all", created_ms=0), SERVED) == allowed_by(None, SERVED) == SERVED
