"""The comparison with llama-server: which outcomes of llama.cpp's tests are an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conformance.llama_server_run import LlamaServerRun
from tests.conformance.llama_server_shim import replace_models
from tests.conformance.outcomes import LeftOut, Outcome, compare, read_left_out

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "conformance"
LEFT_OUT = [LeftOut("not built", ("a.py::old[*",)), LeftOut("depends on the load", ("a.py::slow",), may_pass=True)]
PASSED = {"a.py::new", "a.py::old[1]", "a.py::slow"}


@pytest.mark.parametrize(
    ("test", "outcome", "wrong"),
    [
        ("a.py::new", "failed", "passes against llama-server, and fails here"),
        ("a.py::new", "passed", ""),
        ("a.py::old[1]", "failed", ""),
        ("a.py::old[1]", "passed", "passes, although left_out.toml names it"),
        ("a.py::slow", "failed", ""),
        ("a.py::slow", "passed", ""),
        ("a.py::other", "failed", ""),  # as against llama-server
        ("a.py::other", "passed", ""),
    ],
)
def test_an_outcome_that_differs_from_the_expected_one_is_an_error(test: str, outcome: str, wrong: str) -> None:
    found = compare([Outcome(test, outcome, "why")], LEFT_OUT, PASSED, is_whole=False)
    assert (wrong in found[test]) if wrong else not found


def test_a_name_of_no_test_that_passes_against_llama_server_is_an_error() -> None:
    groups = [*LEFT_OUT, LeftOut("gone", ("a.py::gone",))]
    assert list(compare([], groups, PASSED, is_whole=True)) == ["a.py::gone"]


def test_the_named_tests_pass_against_llama_server() -> None:
    run = LlamaServerRun.read(FOLDER / "llama_server.json")
    assert not compare([], read_left_out(FOLDER / "left_out.toml"), run.passed, is_whole=True)
    assert f"{len(run.passed)} of these tests pass against llama-server" in (ROOT / "docs" / "http.md").read_text()


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    outcomes = [
        Outcome("a", "passed", "", token_counts=(7,)),
        Outcome("b", "failed", "why"),
        Outcome("c", "skipped", ""),
    ]
    LlamaServerRun.of(outcomes).write(tmp_path / "run.json")
    read = LlamaServerRun.read(tmp_path / "run.json")
    assert read.passed == {"a"}
    assert read.token_counts == {"a": [7]}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["g"]),
        (["--hf-repo", "x", "--hf-file", "y", "--port", "1", "--embedding"], ["e", "--port", "1", "--embedding"]),
        (["--reranking", "--model", "z"], ["r", "--reranking"]),
        (["--no-jinja"], ["g", "--jinja"]),
        (["--no-jinja", "--chat-template", "llama3"], ["g", "--no-jinja", "--chat-template", "llama3"]),
    ],
)
def test_llama_server_gets_the_model_that_stands_in(flags: list[str], expected: list[str]) -> None:
    models = {"generation": "g", "embedding": "e", "reranking": "r"}
    model, *rest = expected
    assert replace_models(flags, models) == ["--model", model, "--threads", "1", *rest]
