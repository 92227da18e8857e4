"""The examples of docs/http.md, embeddings.md, scoring.md, cache.md and cli.md run as written, with real workers."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.command_line import llamaq
from tests.support.http_server import serving_http
from typer.testing import CliRunner

from llamaq.cli.main import build_app
from llamaq.common.errors import LlamaqError
from llamaq.producer import AsyncClient, AsyncJob, Client

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue, StartWorker

DOCS = Path(__file__).resolve().parents[2] / "docs"
URL_OF_THE_PAGES = "http://localhost:8080"
STORY = "Once upon a time there was a little fox who lived in a deep green forest near a quiet river. " * 6


def examples(page: str, language: str) -> list[str]:
    """Return the blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands(page: str, language: str = "console") -> list[list[str]]:
    """Return the arguments of the `llamaq` commands in the first block of a page in a language."""
    lines = examples(page, language)[0].splitlines()
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("$ llamaq ")]


async def run_beside_a_server(served: ServedQueue, example: str) -> dict[str, Any]:
    """Run an example beside an HTTP server of the queue, and return its variables."""
    names: dict[str, Any] = {}
    async with serving_http(served.url, served.queue) as url:
        code = compile(example.replace(URL_OF_THE_PAGES, url), "docs", "exec")
        await asyncio.to_thread(exec, code, names)
    return names


async def test_the_example_of_a_batch_prints_its_answers(demo: ServedQueue, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = examples("http.md", "python")
    names = await run_beside_a_server(demo, example)
    names["client"].close()
    counts, _, answers = capsys.readouterr().out.partition(" {")
    assert "completed=100, failed=0, total=100" in counts
    lines = [json.loads(line) for line in f"{{{answers}".splitlines() if line]
    assert {line["custom_id"] for line in lines} == {str(number) for number in range(100)}
    assert all(line["response"]["body"]["choices"][0]["text"] for line in lines)


def test_the_examples_of_embeddings_compare_texts_and_rank_documents(
    embedder: ServedQueue,
    reranker: ServedQueue,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", embedder.url)
    clients, _ = examples("embeddings.md", "python")
    names: dict[str, Any] = {}
    exec(clients.replace('"embed"', repr(embedder.queue)).replace('"rerank"', repr(reranker.queue)), names)
    assert 0.5 < names["similarity"] <= 1.001
    ranking = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {index for index, _ in ranking} == {"0", "1"}
    assert float(ranking[0][1]) >= float(ranking[1][1])


async def test_the_example_of_langchain_embeds_a_text(
    embedder: ServedQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    _, example = examples("embeddings.md", "python")
    names = await run_beside_a_server(embedder, example.replace('"embed"', repr(embedder.queue)))
    names["embeddings"].client._client.close()
    assert int(capsys.readouterr().out) > 10


def test_the_row_of_a_bulk_run_for_an_embedding_is_answered(embedder: ServedQueue, tmp_path: Path) -> None:
    (row,) = re.findall(r"`(\{\"id\": 1, \"embed\".*?\})`", (DOCS / "embeddings.md").read_text())
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text(row)
    arguments = ["bulk", "run", str(rows), "-o", str(answers), "--redis-url", embedder.url, "--queue", embedder.queue]
    done = CliRunner().invoke(build_app("bulk"), arguments)
    assert done.exit_code == 0, done.output
    assert len(json.loads(answers.read_text())["embeddings"]) == 1


def test_the_examples_of_scoring_print_the_probabilities_of_texts(
    demo: ServedQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMAQ_REDIS_URL", demo.url)
    monkeypatch.setenv("LLAMAQ_QUEUE", demo.queue)
    one_text, perplexities = examples("scoring.md", "python")
    exec(one_text, {})
    lines = capsys.readouterr().out.splitlines()
    with demo.client() as client:
        tokens = client.tokenize("Once upon a time there was a little dog")
    assert [int(line.split()[0]) for line in lines] == tokens[1:]
    (commands_of_a_run,) = examples("scoring.md", "bash")
    *writing, running = commands_of_a_run.splitlines()
    subprocess.run("\n".join(writing), shell=True, check=True)
    done = CliRunner().invoke(build_app("bulk"), shlex.split(running)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["text"] for line in Path("scores.jsonl").read_text().splitlines()] == ["", ""]
    exec(perplexities, {})
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert 1 < float(found["a"]) < float(found["b"]) / 5


@pytest.fixture(scope="module")
def keeper(start_worker: StartWorker, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker with the demo model that saves slots to disk."""
    return start_worker("keeper", demo_model, cache_dir=str(tmp_path_factory.mktemp("cache")), cache_disk_mb=0)


async def test_the_options_of_the_page_of_the_cache_are_accepted_and_have_their_effects(keeper: ServedQueue) -> None:
    (example,) = examples("cache.md", "python")
    chat = [{"role": "system", "content": STORY}, {"role": "user", "content": "Hello"}]
    results = []
    async with AsyncClient(keeper.url, keeper.queue, timeout_s=60) as client:
        names = {"client": client, "prompt": STORY, "chat": chat}
        for line in example.splitlines():
            code = compile(
                line.replace("await ", "job = await ", 1), "cache.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            begun = eval(code, names)
            if inspect.isawaitable(begun):
                await begun
            job: Any = names["job"]
            assert isinstance(job, AsyncJob)
            results.append(await job.result())
        again = await client.generate(STORY, cache_salt="tenant-42", max_tokens=1)
        other = await client.generate(STORY, cache_salt="tenant-43", max_tokens=1)
    assert results[0].stats.prefix_cache_tokens == results[1].stats.prefix_cache_tokens == 0
    assert results[4].stats.slot == 3
    assert again.stats.prefix_cache_tokens > other.stats.prefix_cache_tokens


def test_the_slot_commands_of_the_page_of_the_cache_do_what_their_comments_say(
    keeper: ServedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", keeper.url)
    monkeypatch.setenv("LLAMAQ_QUEUE", keeper.queue)
    with Client(keeper.url, keeper.queue, timeout_s=60) as client:
        client.generate(STORY, slot=0, max_tokens=4)

        def contents() -> list[int]:
            return [slot.content_tokens for slot in client.slots()[0].slots]

        list_slots, save, restore, erase_slot, erase_file = commands("cache.md")
        assert "slot" in llamaq(*list_slots)
        llamaq(*save)
        (file,) = client.slots()[0].files
        assert file.name == "NAME"
        llamaq(*restore)
        assert contents()[2] == file.n_tokens
        llamaq(*erase_slot)
        assert contents()[2] == 0
        llamaq(*erase_file)
        assert not client.slots()[0].files
        (calls,) = re.findall(r"From Python: (.*?)\. If", (DOCS / "cache.md").read_text(), re.DOTALL)
        client.generate(STORY, slot=0, max_tokens=4)
        for call in re.findall(r"`(.*?)`", calls):
            eval(f"client.{call}", {"client": client})
        assert not client.slots()[0].files
        with pytest.raises(LlamaqError):
            client.erase_saved_slot("NAME")


async def test_the_commands_add_api_keys_with_which_a_chat_over_http_prints_an_answer(
    demo: ServedQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", demo.url)
    page = (DOCS / "http.md").read_text()
    to_redis, *to_file = re.findall(r"llamaq (keys add alice --(?:queues default.*|file keys.json))", page)
    (command,) = commands("cli.md")
    file = tmp_path / "keys.json"
    added = shlex.split(to_redis.replace("--queues default", f"--queues {demo.queue}"))
    added_to_file = [shlex.split(each.rstrip("`").replace("keys.json", str(file))) for each in to_file]
    keys = [await asyncio.to_thread(llamaq, *each) for each in (added, *added_to_file)]
    assert len(keys) == 2
    async with serving_http(demo.url, demo.queue, require_key=True, keys_file=file) as url:
        for key in keys:
            values = {URL_OF_THE_PAGES: url, "KEY": key.strip()}
            arguments = [values.get(each, each) for each in (*command, "--queue", demo.queue, "--max-tokens", "20")]
            assert len(await asyncio.to_thread(llamaq, *arguments)) > 20
    await asyncio.to_thread(llamaq, "keys", "revoke", "alice")
