"""The commands for bulk runs of RQ workers, with a fake worker and an RQ worker in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from tests.producer.rq.conftest import work
from tests.support.command_line import failing, llamaq
from typer.testing import CliRunner, Result

from llamaq.cli.main import build_app
from llamaq.common.errors import BulkRunRefused, InvalidRequest
from llamaq.producer.rq import RunState, RunStatus


@pytest.fixture
def rq_queue(served: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setenv("LLAMAQ_RQ_QUEUE", f"rq-{served}")
    return Queue(f"rq-{served}", connection=Redis.from_url(redis_url), serializer=JSONSerializer)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"id": f"r{n}", "prompt": f"one two {n}"}) + "\n" for n in range(3)))
    return file


def call(*args: str, code: int = 0) -> tuple[str, str]:
    """Run `llamaq bulk` and return its output and its notices."""
    result = CliRunner().invoke(build_app("bulk"), ["bulk", *args], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_a_run_is_submitted_listed_awaited_and_its_errors_tried_again(rq_queue: Queue, rows: Path) -> None:
    output = rows.with_name("out.jsonl")
    run_id, notice = call("submit", str(rows), "-o", str(output), "--max-tokens", "9")
    run_id = run_id.strip()
    assert notice == f"llamaq: no RQ worker serves RQ queue '{rq_queue.name}'; start one with: llamaq bulk worker\n"
    listed = RunStatus.model_validate_json(llamaq("bulk", "list", "--json"))
    assert (listed.run_id, listed.state) == (run_id, RunState.QUEUED)
    later = call("submit", str(rows), "-o", str(rows.with_name("b.jsonl")), "--at", "2h")[0].strip()
    assert "is scheduled after 0.1 s" in call("wait", later, "--wait-s", "0.1", code=4)[1]
    assert llamaq("bulk", "cancel", later) == f"{later}: cancelled\n"
    call("wait", later, code=1)
    work(rq_queue)
    assert call("wait", run_id)[1] == f"llamaq: {run_id}: completed\n"
    assert {json.loads(line)["text"] for line in output.read_text().splitlines()} == {f"one two {n} " for n in range(3)}
    assert "rows_done         3\n" in llamaq("bulk", "status", run_id)
    assert f"{run_id}  completed  3/3   0       {output}" in llamaq("bulk", "list")
    bad = rows.with_name("bad.jsonl")
    bad.write_text(json.dumps({"prompt": "p", "temperature": "hot"}) + "\n")
    failing_id = call("submit", str(bad), "-o", str(rows.with_name("c.jsonl")))[0].strip()
    work(rq_queue)
    assert "1 row has failed" in call("wait", failing_id, code=1)[1]
    assert llamaq("bulk", "retry-errors", run_id) == f"{run_id}: queued\n"
    work(rq_queue)
    assert json.loads(llamaq("bulk", "status", run_id, "--json"))["progress"]["rows_before"] == 3


def test_errors_of_a_submit_name_the_option_or_the_run(
    rq_queue: Queue, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit = ["bulk", "submit", str(rows), "-o", str(rows.with_name("out.jsonl"))]
    assert "'soon' is not a time" in failing(monkeypatch, capsys, *submit, "--at", "soon", code=2)
    assert "there is no run other" in failing(monkeypatch, capsys, *submit, "--after", "other", code=2)
    assert "there is no run other" in failing(monkeypatch, capsys, "bulk", "status", "other", code=2)
    cluster = ["--rq-url", "redis+cluster://localhost"]
    assert "RQ needs a single Redis server" in failing(monkeypatch, capsys, *submit, *cluster, code=2)
    assert llamaq("bulk", "list") == f"RQ queue '{rq_queue.name}' has no bulk run\n"


def test_rows_of_standard_input_do_not_replace_those_of_a_run_that_waits(rq_queue: Queue, rows: Path) -> None:
    output = rows.with_name("out.jsonl")

    def pipe(stdin: bytes) -> Result:
        submit = ["bulk", "submit", "-", "-o", str(output), "--run-id", f"piped-{rq_queue.name}", "--at", "8h"]
        return CliRunner().invoke(build_app("bulk"), submit, input=stdin, catch_exceptions=False)

    assert pipe(rows.read_bytes()).exit_code == 0
    with pytest.raises(BulkRunRefused, match=r"other rows than standard input: .* delete .*out\.jsonl\.input\.jsonl"):
        pipe(b'{"prompt": "x"}\n')
    with pytest.raises(InvalidRequest, match="is already submitted"):
        pipe(rows.read_bytes())
    assert rows.with_name("out.jsonl.input.jsonl").read_bytes() == rows.read_bytes()
