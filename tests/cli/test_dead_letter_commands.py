"""`llamaq dead`: list, show, retry and purge."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.support.command_line import failing, llamaq
from tests.support.dead_letters import add_dead_job, add_dead_letters
from typer.testing import CliRunner

from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from llamaq.cli.main import build_app
from llamaq.producer import AsyncClient, Client, DeadLetter, DeadLetterDetails
from llamaq.producer.testing import FakeWorker


@pytest.fixture
def letters(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of two dead letters: a dead job, and an entry that is not a job. Commands use their queue by default."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    monkeypatch.setenv("COLUMNS", "200")
    return asyncio.run(add_dead_letters(redis_url, queue))


def test_list_and_show_print_tables_and_json(letters: list[str]) -> None:
    job_id, garbage = letters
    table = llamaq("dead", "list")
    assert job_id in table
    assert "3 workers died with this job" in table
    assert garbage in table
    listed = [DeadLetter.model_validate_json(line) for line in llamaq("dead", "list", "--json").splitlines()]
    assert [letter.id for letter in listed] == [garbage, job_id]
    shown = llamaq("dead", "show", job_id)
    assert "what kills" in shown
    assert "a b c" in shown
    assert "two tokens" in shown
    assert "nonsense" in llamaq("dead", "show", garbage)
    details = DeadLetterDetails.model_validate_json(llamaq("dead", "show", job_id, "--json"))
    assert details.request is not None
    assert details.request.prompt == "what kills"


def test_retry_submits_one_job_and_prints_its_id(letters: list[str], redis_url: str, queue: str) -> None:
    job_id, garbage = letters
    new_id = llamaq("dead", "retry", job_id).strip()
    assert json.loads(llamaq("status", new_id, "--json"))["state"] == "queued"
    assert llamaq("dead", "retry", "--all") == ""
    with Client(redis_url, queue) as client:
        assert [letter.id for letter in client.dead_letters()] == [garbage]


def test_retry_and_purge_have_an_option_for_all_letters(letters: list[str]) -> None:
    retried = json.loads(llamaq("dead", "retry", "--all", "--json"))
    assert retried["id"] == letters[0]
    assert retried["job_id"] not in letters
    assert json.loads(llamaq("dead", "purge", letters[1], "--json")) == {"id": letters[1]}
    assert llamaq("dead", "purge", "--all", "--yes") == ""
    assert llamaq("dead", "list", "--json") == ""
    assert llamaq("dead", "list") == f"queue {retried['job_id'].split('.')[0]!r} has no dead letters\n"


def test_purge_of_all_letters_continues_after_one_that_another_process_has_removed(
    letters: list[str], redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with exit code 1, and left the other letters."""
    whole = Client.dead_letters

    def dead_letters(client: Client) -> tuple[DeadLetter, ...]:
        found = whole(client)
        client.purge_dead_letter(found[-1].id)
        return found

    monkeypatch.setattr(Client, "dead_letters", dead_letters)
    assert json.loads(llamaq("dead", "purge", "--all", "--yes", "--json")) == {"id": letters[1]}
    with Client(redis_url, queue) as client:
        assert not whole(client)


def test_an_error_is_one_line(
    letters: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, complaint, code in (
        (["retry", letters[1]], "is not a job", 2),
        (["show", letters[0][:-1] + "x"], "not a job id", 2),
        (["purge", letters[0][:-4] + "0000"], "no dead letter", 1),
    ):
        assert complaint in failing(monkeypatch, capsys, "dead", *args, code=code)


@pytest.mark.parametrize("args", [["retry"], ["purge"], ["purge", "x", "--all"]])
def test_retry_and_purge_require_one_id_or_all(args: list[str]) -> None:
    result = CliRunner().invoke(build_app("dead"), ["dead", *args])
    assert result.exit_code == 2
    assert "--all" in result.stderr


def test_retry_of_all_letters_goes_on_after_a_damaged_one_and_reports_it(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)

    async def add_two() -> list[str]:
        async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
            damaged = await add_dead_job(client, worker, "one")
            await add_dead_job(client, worker, "two")
            await client.redis.hset(client.keys.of_job(damaged).job, "request", b"\xc1")
            return [letter.id for letter in reversed(await client.dead_letters())]

    damaged, whole = asyncio.run(add_two())
    retried = CliRunner().invoke(build_app(), ["dead", "retry", "--all", "--json"])
    assert retried.exit_code == EXIT_FAILED
    assert f"llamaq: {damaged} is not retried: " in retried.stderr
    assert json.loads(retried.stdout)["id"] == whole
    with Client(redis_url, queue) as client:
        assert [letter.id for letter in client.dead_letters()] == [damaged]


def test_purge_of_all_letters_asks_first(letters: list[str], queue: str) -> None:
    def purge(answer: str, *options: str) -> tuple[int, str]:
        done = CliRunner().invoke(build_app("dead"), ["dead", "purge", *options], input=answer)
        return done.exit_code, done.stderr

    code, asked = purge("n\n", "--all")
    assert code == EXIT_FAILED
    assert f"Remove all dead letters of queue {queue!r}?" in asked
    assert purge("", "--all")[0] == EXIT_INTERRUPTED
    assert len(llamaq("dead", "list", "--json").splitlines()) == 2
    assert purge("", letters[0]) == (0, "")
    assert purge("y\n", "--all")[0] == 0
    assert llamaq("dead", "list", "--json") == ""
    assert purge("", "--all") == (0, "")
