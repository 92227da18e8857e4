from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import JobId, Keys
from llamaq.common.settings import QueueSettings

names = st.from_regex(r"[A-Za-z0-9_\-]{1,64}", fullmatch=True)


@given(names, st.integers(1, 1024), st.none() | st.text(max_size=300))
def test_a_job_id_contains_its_queue_and_partition(queue: str, partitions: int, key: str | None) -> None:
    job_id = JobId.new(queue, partitions, key)
    assert JobId.parse(str(job_id)) == job_id
    assert job_id.queue == queue
    assert 0 <= job_id.partition < partitions


@given(st.text(max_size=300))
def test_jobs_with_one_idempotency_key_are_in_one_partition(key: str) -> None:
    assert JobId.new("q", 64, key).partition == JobId.new("q", 64, key).partition
    assert JobId.new("q", 64, key).digits != JobId.new("q", 64, key).digits


@given(st.text() | st.from_regex(r"[a-z]{1,3}\.[0-9]{1,5}\.[0-9a-f]{31,33}\n?", fullmatch=True))
@example(f"a.1023.{'0f' * 16}")
def test_any_text_is_a_job_id_or_raises_invalid_request(text: str) -> None:
    try:
        parsed = JobId.parse(text)
    except InvalidRequest:
        return
    assert str(parsed).rpartition(".")[2] == text.rpartition(".")[2]
    assert len(parsed.digits) == 32
    assert "\n" not in text


@pytest.mark.parametrize("bad", ["", "a b", "a.b", "{a}", "a:b", "x" * 65, "a\n", "ä"])
def test_an_invalid_queue_name_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="queue"):
        QueueSettings(queue=bad)


def test_all_keys_of_a_job_share_one_hash_tag() -> None:
    keys = Keys("pre")
    job_id = str(JobId("q", 7, "0" * 32))
    of_job = dataclasses.asdict(keys.of_job(job_id)).values()
    others = [keys.config("q", 7), keys.dead("q", 7), keys.idempotency("q", 7, "{x}"), keys.jobs("q", 7, Priority.BULK)]
    for key in [*of_job, *others]:
        assert key.startswith("pre:{q:7}:")
        assert key.count("{") == 1


def test_all_keys_are_different() -> None:
    keys = Keys()
    job_id = str(JobId("q", 0, "0" * 32))
    made = [*dataclasses.asdict(keys.of_job(job_id)).values(), keys.config("q", 0), keys.dead("q", 0)]
    made += [keys.stats("q"), keys.workers("q"), keys.worker("w"), keys.vocab("v"), keys.idempotency("q", 0, "k")]
    made += [keys.slot_commands("w"), keys.text_commands("w"), keys.reply("0" * 32)]
    assert len(set(made)) == len(made)
    assert all(key.startswith("llamaq:") for key in made)


def test_the_name_of_a_redis_key_does_not_contain_the_idempotency_key() -> None:
    assert "secret" not in Keys().idempotency("q", 0, "secret")
