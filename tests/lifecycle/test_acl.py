"""A Redis user with only the permissions that llamaq needs."""

from __future__ import annotations

import secrets
import signal
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from llamaq.cli.metrics_command import read_metrics
from llamaq.common.metrics.metric_definitions import REDIS_UP, REDIS_USED_MEMORY
from llamaq.common.settings import client_settings
from llamaq.producer import Client, NotDurable
from llamaq.producer import durability as durability_module
from llamaq.producer.queries.metrics import MetricsReader

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Read

RULES = ["~llamaq:*", "resetchannels", "&llamaq:*", "+@all", "-@admin", "-@dangerous", "+client|setname"]
"""The rules of docs/redis.md."""


def test_worker_and_client_run_as_a_user_that_sees_only_the_keys_of_llamaq(
    environment: Environment, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", 0.01)
    name, password = f"user{secrets.token_hex(4)}", secrets.token_hex(8)
    with Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", name, "on", f">{password}", *RULES)
        try:
            separator = "&" if "?" in redis_url else "?"
            url = f"{redis_url}{separator}username={name}&password={password}"
            with Redis.from_url(url) as limited, pytest.raises(NoPermissionError):
                limited.get("key-of-another-application")
            environment.start_worker(LLAMAQ_REDIS_URL=url)
            with Client(url, environment.queue) as client:
                job = client.submit("Once upon a time", max_tokens=12)
                assert sum(len(chunk.tokens) for chunk in job.stream()) == job.result().stats.generated_tokens
                assert client.queue_depth().waiting == 0
                assert len(client.workers()) == 1
                assert client.tokenizer().encode("a")
                client.pause()
                client.resume()
                samples = read_metrics(client_settings(redis_url=url), MetricsReader([environment.queue]))
                assert samples.values[REDIS_UP] == {(): 1}
                assert REDIS_USED_MEMORY not in samples.values, "this user has no permission for INFO"
                with pytest.raises(NotDurable):  # the server has no replica
                    client.submit("x", max_tokens=1, durable=1)
            refused = [entry for entry in admin.acl_log() if entry["username"] == name]
            objects = {entry["object"] for entry in refused if "llamaq" in entry["client-info"]["name"]}
            objects = {name.partition("|")[0] for name in objects}  # from Redis 7 on, `config|get` instead of `config`
            assert objects <= {"config", "info"}, "these commands are optional"
        finally:
            environment.end_commands()  # while the user still exists: without it, a worker cannot requeue its jobs
            admin.execute_command("ACL", "DELUSER", name)


def test_a_new_password_replaces_the_old_one_while_streams_run(
    environment: Environment, redis_url: str, read: Read
) -> None:
    name, separator = f"user{secrets.token_hex(4)}", "&" if "?" in redis_url else "?"
    old_url, new_url = (f"{redis_url}{separator}username={name}&password={each}" for each in ("old", "new"))
    pace: Any = {"LLAMAQ_LEASE_S": "60", "LLAMAQ_DRAIN_S": "0.2", "LINGER_TOKENS": "100"}
    with Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", name, "on", ">old", *RULES)
        try:
            first = environment.start_worker(LLAMAQ_REDIS_URL=old_url, **pace)
            with Client(old_url, environment.queue) as client:
                reader = read(client.submit("Once upon a time", max_tokens=150, ignore_eos=True, temperature=0))
                reader.await_tokens(20)
                admin.execute_command("ACL", "SETUSER", name, ">new")  # from now on, both passwords are valid
                second = environment.start_worker(LLAMAQ_REDIS_URL=new_url, **pace)
                first.signal(signal.SIGTERM)
                assert first.end() == 0
                admin.execute_command("ACL", "SETUSER", name, "<old")  # open connections remain
                environment.let_jobs_finish()
                reader.join()
                assert reader.error is None
                with pytest.raises(AuthenticationError), Client(old_url, environment.queue) as refused:
                    refused.queue_depth()
            with Client(new_url, environment.queue) as client:
                result = client.job(reader.job.id).result()
                assert (result.text, len(result.tokens)) == (reader.text, 150)
                assert client.job(reader.job.id).status().worker == second.worker_id
                assert client.generate("Once upon a time", max_tokens=3).tokens
        finally:
            environment.end_commands()
            admin.execute_command("ACL", "DELUSER", name)
