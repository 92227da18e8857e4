"""What the commands print of a stream."""

from __future__ import annotations

import json

import pytest

from llamaq.cli.views import show_dead_letter, show_stream
from llamaq.producer import Chunk, DeadLetterDetails, PromptProgress

PROGRESS = PromptProgress(total_tokens=30, cached_tokens=5, processed_tokens=20, time_ms=1.5)
CHUNKS = [Chunk("", (), 0, 0, progress=PROGRESS), Chunk("a", (7,), 1, 0)]


def test_the_progress_of_the_prompt_does_not_mix_with_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_stream(CHUNKS)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a\n", "llamaq: 20 of 30 tokens of the prompt are ready\n")


def test_the_progress_of_the_prompt_is_an_object_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    show_stream(CHUNKS, as_json=True)
    progress, text = map(json.loads, capsys.readouterr().out.splitlines())
    assert (progress["type"], progress["processed_tokens"]) == ("prompt_progress", 20)
    assert text == {"text": "a", "tokens": [7], "index": 1, "offset": 0}


@pytest.mark.parametrize(("job_id", "line"), [("q.0.1", "request     expired\n"), (None, "")])
def test_a_dead_letter_shows_that_the_request_of_its_job_has_expired(
    job_id: str | None, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_dead_letter(DeadLetterDetails(id="q.0.1", job_id=job_id, reason="", dead_ms=0, partition=0, entry="1-1"))
    assert capsys.readouterr().out == f"id          q.0.1\ndied (UTC)  1970-01-01 00:00:00\n{line}"
