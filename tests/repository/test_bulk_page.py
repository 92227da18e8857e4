"""The commands and the Python examples of docs/bulk.md run as they are written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamaq.cli.main import build_app
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.testing import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bulk.md"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def served(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name, value in (("REDIS_URL", redis_url), ("QUEUE", queue)):
        monkeypatch.setenv(f"LLAMAQ_{name}", value)
    monkeypatch.chdir(tmp_path)

    def answer(request: JobRequest) -> list[str]:
        return ["re: ", request.prompt or ""]

    with serving(redis_url, queue, answer):
        yield


def test_three_commands_lead_from_a_file_to_results_and_a_program_does_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (commands,) = examples("bash")
    _, writing, running = commands.splitlines()
    subprocess.run(writing, shell=True, check=True)
    done = CliRunner().invoke(build_app("bulk"), shlex.split(running)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    answer = json.loads(Path("answers.jsonl").read_text())
    assert (answer["line"], answer["id"], answer["text"]) == (1, 1, "re: The capital of Italy is")
    for path in Path().glob("answers.*"):
        path.unlink()
    mapping, program = examples("python")
    exec(mapping, {})
    assert "2 re: Translate: three" in capsys.readouterr().out
    for _ in range(2):  # the second start continues the run
        exec(program, {})
        assert "completed 0" in capsys.readouterr().out
