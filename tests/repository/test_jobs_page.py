"""The examples of docs/jobs.md run as they are written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import llamaq.producer
from llamaq.producer import Client, JobFailed, LlamaqError
from llamaq.producer.testing import serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "jobs.md").read_text()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_the_examples_run_one_after_the_other(redis_url: str, queue: str, capsys: pytest.CaptureFixture[str]) -> None:
    tools, progress, many, tenants = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    messages = [{"role": "user", "content": "Hello"}]
    with serving(redis_url, queue, lambda _: ["Hel", "lo"]), Client(redis_url, queue) as client:
        names: dict[str, Any] = {"client": client, "messages": messages, "tools": [TOOL], "prompt": "say", "sys": sys}
        names["texts"] = ["a", "b"]
        exec(tools, names)
        exec(progress, names)
        exec(many, names)
        assert [job.result().text for job in names["jobs"]] == ["Hello", "Hello"]
        exec(tenants, names)
    assert names["answer"].content == "Hello"
    assert capsys.readouterr().out == " Hello ()\nHello"


def test_the_table_of_errors_has_each_error_of_the_clients_with_its_status() -> None:
    table = PAGE.partition("| error | `http_status` | meaning |")[2].partition("\n\n")[0]
    shown = {name: int(status) for name, status in re.findall(r"^\| `(\w+)` \| (\d+) \|", table, re.MULTILINE)}
    public = [getattr(llamaq.producer, name) for name in llamaq.producer.__all__]
    errors = [each for each in public if isinstance(each, type) and issubclass(each, LlamaqError)]
    assert shown == {kind.__name__: kind.http_status for kind in errors if kind is not LlamaqError}
    assert JobFailed("prompt_too_long", "").http_status == 400
