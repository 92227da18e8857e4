"""A batch survives the death of the server that runs it: each line is answered once."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import httpx
from tests.lifecycle.conftest import wait_until

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

N_LINES = 60


def answer_of(number: int) -> str:
    """Return the answer of a line. The last one is long: with LINGER_TOKENS, the batch lasts until it may finish."""
    return f"answer {number}" + " and so on" * 20 * (number == N_LINES - 1)


def lines() -> bytes:
    """Return an input file whose answers are known: the grammar of each line allows one text."""
    rows = (
        {
            "custom_id": f"row {number}",
            "url": "/v1/completions",
            "body": {"prompt": "x", "grammar": f'root ::= "{answer_of(number)}"'},
        }
        for number in range(N_LINES)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_another_server_finishes_the_batch_of_a_killed_one(environment: Environment) -> None:
    environment.start_worker(LINGER_TOKENS="20")
    variables = {"LLAMAQ_REDIS_URL": environment.redis_url, "LLAMAQ_QUEUE": environment.queue}
    variables |= {"LLAMAQ_BATCH_LEASE_S": "1"}
    first = environment.start("serve", "--http-port", "0", **variables)
    with httpx.Client(base_url=first.await_output(r"http\.ready url=(http://\S+)")[1], timeout=60) as http:
        file = http.post("/v1/files", files={"file": ("in.jsonl", lines())}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_path = f"/v1/batches/{http.post('/v1/batches', json=asked).json()['id']}"
        wait_until(lambda: http.get(batch_path).json()["request_counts"]["completed"] >= 5, "some answers")
        before = http.get(batch_path).json()["request_counts"]["completed"]
        first.signal(signal.SIGKILL)
    environment.let_jobs_finish()
    second = environment.start("serve", "--http-port", "0", **variables)
    with httpx.Client(base_url=second.await_output(r"http\.ready url=(http://\S+)")[1], timeout=60) as http:
        wait_until(lambda: http.get(batch_path).json()["status"] == "completed", "the end of the batch")
        batch = http.get(batch_path).json()
        output = http.get(f"/v1/files/{batch['output_file_id']}/content").text
    answers = [json.loads(line) for line in output.splitlines()]
    assert before < N_LINES
    assert batch["request_counts"] == {"total": N_LINES, "completed": N_LINES, "failed": 0}
    assert {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers} == {
        f"row {number}": answer_of(number) for number in range(N_LINES)
    }
    assert len(answers) == N_LINES
