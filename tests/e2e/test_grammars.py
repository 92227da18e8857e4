"""A grammar or a JSON schema constrains the text of a job, and an invalid one fails only its job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.producer import Client, JobFailed

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

STORY = "Once upon a time"


def test_the_text_matches_the_grammar(client: Client) -> None:
    grammar = 'root ::= "The " ("cat" | "dog") " has " [0-9] [0-9] " " things "."\nthings ::= "books" | "kites"'
    for seed in range(5):
        result = client.generate(STORY, max_tokens=60, temperature=2.0, seed=seed, grammar=grammar)
        words = result.text.split()
        assert result.finish_reason is FinishReason.STOP
        assert words[0] == "The"
        assert words[1] in {"cat", "dog"}
        assert words[3].isdigit()
        assert words[4] in {"books.", "kites."}


def test_grammar_root_names_another_rule(client: Client) -> None:
    result = client.generate(
        STORY, max_tokens=20, grammar='root ::= "no"\nanswer ::= "yes, " root', grammar_root="answer"
    )
    assert result.text == "yes, no"


def test_the_text_matches_the_json_schema(client: Client) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["Mia", "Tom"]},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "likes": {"type": "array", "items": {"enum": ["tea", "bread"]}, "minItems": 1, "maxItems": 3},
            "is_old": {"type": "boolean"},
        },
        "required": ["name", "age", "likes", "is_old"],
        "additionalProperties": False,
    }
    for seed in range(4):
        result = client.generate("Who is it?", max_tokens=400, seed=seed, json_schema=schema)
        assert result.finish_reason is FinishReason.STOP
        person = json.loads(result.text)
        assert set(person) == {"name", "age", "likes", "is_old"}
        assert person["name"] in {"Mia", "Tom"}
        assert 1 <= person["age"] <= 99
        assert set(person["likes"]) <= {"tea", "bread"}
        assert 1 <= len(person["likes"]) <= 3
        assert isinstance(person["is_old"], bool)


@pytest.mark.parametrize(
    "options",
    [
        {"grammar": "root ::= ("},
        {"grammar": "root ::= nobody"},
        {"grammar": 'other ::= "a"'},
        {"grammar": 'root ::= root "a"'},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": 'root ::= "a"{1000000}'},
        {"grammar": "\x00\x01 ::= \ud7ff"},
        {"json_schema": {"type": "nothing that there is"}},
        {"json_schema": {"$ref": "#/nowhere"}},
        {"json_schema": {"enum": ["x" * 70_000]}},
    ],
    ids=lambda options: str(options)[:40],
)
def test_an_invalid_grammar_fails_only_its_job(client: Client, demo: ServedQueue, options: dict[str, Any]) -> None:
    neighbour = client.submit(STORY, max_tokens=20, ignore_eos=True)
    with pytest.raises(JobFailed) as failed:
        client.generate(STORY, max_tokens=20, **options)
    assert failed.value.code == "invalid_grammar"
    assert neighbour.result().stats.generated_tokens == 20
    assert demo.is_running
