"""Slot commands with a real worker on the demo model: saved states survive the worker and are restored by name."""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.redis_servers import ClusterServers

from llamaq.producer import Client, InvalidRequest, SlotCommandRefused, SlotFile

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment

STORY = "Once upon a time there was a little fox who lived in a deep green forest near a quiet river. " * 6
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


def start_worker(environment: Environment, **variables: Any) -> Command:
    """Start a worker that saves slots to disk, but keeps no evicted blocks on disk."""
    return environment.start_worker(
        LLAMAQ_CACHE_DIR=str(environment.folder / "cache"), LLAMAQ_CACHE_DISK_MB="0", **variables
    )


def without_time(file: SlotFile) -> SlotFile:
    """Return the file as a list of files shows it: without the time of a save or restore."""
    return file.model_copy(update={"duration_ms": None})


def test_a_saved_slot_restored_by_the_next_worker_gives_the_same_text(environment: Environment) -> None:
    worker = start_worker(environment)
    with environment.client() as client:
        first = client.generate(STORY, slot=1, **GREEDY)
        more = STORY + first.text + " The fox said"
        expected = client.generate(more, slot=0, cache_prompt=False, **GREEDY)
        assert expected.stats.prefix_cache_tokens == 0
        saved = client.save_slot(1, "fox")
        assert saved.n_tokens == first.stats.prompt_tokens + len(first.tokens) - 1
        worker.signal(signal.SIGTERM)
        assert worker.end() == 0

        worker = start_worker(environment)
        [listed] = client.slots()
        assert listed.worker == worker.worker_id
        assert listed.files == (without_time(saved),)
        assert [slot.content_tokens for slot in listed.slots] == [0, 0, 0, 0]
        restored = client.restore_slot(2, "fox")
        assert without_time(restored) == without_time(saved)
        assert saved.duration_ms
        assert restored.duration_ms
        [listed] = client.slots(worker=worker.worker_id)
        assert [slot.content_tokens for slot in listed.slots] == [0, 0, saved.n_tokens, 0]
        result = client.generate(more, **GREEDY)
        assert result.stats.prefix_cache_tokens >= first.stats.prompt_tokens
        assert (result.stats.slot, result.stats.prefix_cache_tier) == (2, "device")
        assert result.text == expected.text

        assert client.erase_slot(2) == result.stats.prompt_tokens + len(result.tokens)
        assert client.generate(more, **GREEDY).stats.prefix_cache_tokens == 0
        client.erase_saved_slot("fox")
        with pytest.raises(SlotCommandRefused, match="no slot state is saved as 'fox'"):
            client.restore_slot(2, "fox")
        with pytest.raises(InvalidRequest, match="name"):
            client.save_slot(2, "../fox")


def test_commands_that_cannot_be_executed_are_refused_and_the_worker_continues(environment: Environment) -> None:
    start_worker(environment)
    with environment.client() as client:
        with pytest.raises(SlotCommandRefused, match="slot 0 has no state"):
            client.save_slot(0, "fox")
        with pytest.raises(SlotCommandRefused, match="no slot 4: the worker has 4"):
            client.save_slot(4, "fox")
        job = client.submit(STORY, slot=3, **(GREEDY | {"max_tokens": 2000}))
        stream = job.stream()
        next(stream)
        n_before = job.status().generated_tokens
        running = client.save_slot(3, "running")
        assert running.n_tokens >= n_before > 0
        [listed] = client.slots()
        assert (listed.slots[3].job_id, listed.slots[3].state) == (job.id, "decode")
        for refused in (lambda: client.erase_slot(3), lambda: client.restore_slot(3, "running")):
            with pytest.raises(SlotCommandRefused, match=f"slot 3 is running job {job.id}"):
                refused()
        assert without_time(client.restore_slot(1, "running")) == without_time(running)
        assert client.cancel(job.id)
        path = environment.folder / "cache" / "slots" / "running.slot"
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SlotCommandRefused, match="'running' is damaged"):
            client.restore_slot(1, "running")
        path.write_bytes(whole)

        environment.end_commands()
        other_salt = start_worker(environment, LLAMAQ_CACHE_SALT="another")
        assert [file.is_usable for file in client.slots()[0].files] == [False]
        with pytest.raises(SlotCommandRefused, match="another model or other settings"):
            client.restore_slot(1, "running")
        shutil.rmtree(path.parent)
        assert client.slots()[0].files == ()
        listing = environment.start(
            "slots", "list", "--json", LLAMAQ_REDIS_URL=environment.redis_url, LLAMAQ_QUEUE=environment.queue
        )
        assert listing.end() == 0
        assert json.loads(listing.output)["worker"] == other_salt.worker_id


def test_slot_commands_reach_their_worker_in_a_cluster(environment: Environment) -> None:
    with ClusterServers(environment.folder) as nodes:
        environment.redis_url = nodes.url
        try:
            start_worker(environment, LLAMAQ_PARTITIONS="4")
            with Client(nodes.url, environment.queue, partitions=4, timeout_s=20) as client:
                client.generate(STORY, slot=0, **GREEDY)
                saved = client.save_slot(0, "fox")
                assert client.erase_slot(0) > saved.n_tokens
                assert without_time(client.restore_slot(1, "fox")) == without_time(saved)
                again = client.generate(STORY, **GREEDY)
                assert (again.stats.slot, again.stats.prefix_cache_ratio > 0.9) == (1, True)
        finally:
            environment.end_commands()


def test_a_worker_without_a_cache_folder_refuses_and_names_the_setting(environment: Environment) -> None:
    environment.start_worker()
    with environment.client() as client:
        client.generate(STORY, slot=0, **GREEDY)
        assert client.slots()[0].slots[0].content_tokens > 0
        for refused in (
            lambda: client.save_slot(0, "fox"),
            lambda: client.restore_slot(0, "fox"),
            lambda: client.erase_saved_slot("fox"),
        ):
            with pytest.raises(SlotCommandRefused, match="--cache-dir"):
                refused()
