"""The Python examples of docs/rq.md run as they are written, and its commands exist."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from tests.producer.rq.conftest import work
from tests.support.redis_servers import wait_until
from typer.testing import CliRunner

from llamaq.cli.main import build_app
from llamaq.producer.testing import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rq.md"


def example(word: str) -> str:
    """Return the Python example that contains a word."""
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if word in code]
    return str(found)


@pytest.fixture
def served(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Redis]:
    for name, value in (("REDIS_URL", redis_url), ("QUEUE", queue), ("RQ_QUEUE", f"rq-{queue}")):
        monkeypatch.setenv(f"LLAMAQ_{name}", value)
    monkeypatch.chdir(tmp_path)

    def answer(request: object) -> list[str]:
        return ["an answer"]

    with serving(redis_url, queue, answer), Redis.from_url(redis_url) as redis:
        yield redis


def test_the_example_of_a_bulk_run(served: Redis, queue: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("reviews.jsonl").write_text(json.dumps({"prompt": "p"}) + "\n")
    rq_queue = Queue(f"rq-{queue}", connection=served, serializer=JSONSerializer)

    def work_when_submitted() -> None:
        wait_until(rq_queue.get_job_ids, "a submitted run", timeout_s=60)
        work(rq_queue)

    worker = threading.Thread(target=work_when_submitted, daemon=True)
    worker.start()
    exec(example("BulkQueue"), {})
    worker.join()
    assert "completed 1 1" in capsys.readouterr().out
    assert json.loads(Path("answers.jsonl").read_text())["text"] == "an answer"


def test_the_example_of_generations(served: Redis, queue: str, redis_url: str) -> None:
    names: dict[str, object] = {}
    code = example("import cancel_job").replace("Redis()", f"Redis.from_url({redis_url!r})")
    exec(code.replace('Queue("texts"', f'Queue("texts-{queue}"'), names)
    rq_queue = names["queue"]
    assert isinstance(rq_queue, Queue)
    assert rq_queue.count == 1
    work(rq_queue)
    assert len(rq_queue.finished_job_registry.get_job_ids()) == 2
    rq_queue.connection.close()


def test_the_commands_and_options_of_the_page_exist() -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    group, submit = (runner.invoke(build_app("bulk"), ["bulk", *words, "--help"]).output for words in ([], ["submit"]))
    for command in re.findall(r"llamaq bulk ([a-z-]+)", PAGE.read_text()):
        assert command in group
    for option in re.findall(r"`(--(?:after|at|run-retries|on-success|on-failure|rq-url))", PAGE.read_text()):
        assert option in submit
