"""The examples of docs/jobs.md run as they are written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from llamaq.producer import Client
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
