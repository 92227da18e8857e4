"""Each error ends the command with a documented exit code."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from tests.support.command_line import failing

from llamaq.cli import exit_codes
from llamaq.cli.error_report import exit_code_of, explain
from llamaq.common.errors import (
    EmbeddedRedisError,
    InvalidRequest,
    InvalidSettings,
    JobFailed,
    JobNotFound,
    LlamaqError,
    NoWorker,
    QueueFull,
    RedisFull,
    ResultTimeout,
)
from llamaq.common.redis.connect import NotTheMaster, connect
from llamaq.gateway_cli import serve_command
from llamaq.worker.process import exit_codes as worker_exit_codes

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LlamaqError("x"), 1),
        (JobFailed("internal", "x"), 1),
        (JobNotFound("x"), 1),
        (InvalidRequest("x"), 2),
        (InvalidSettings("x"), 2),
        (RedisConnectionError("x"), 3),
        (ResponseError("x"), 3),
        (RedisFull("q"), 3),
        (EmbeddedRedisError("x"), 3),
        (NoWorker("q"), 4),
        (QueueFull("q", 1, 1), 4),
        (ResultTimeout("x"), 4),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: LlamaqError | RedisConnectionError, code: int) -> None:
    assert exit_code_of(error) == code


def test_a_replica_is_not_reported_as_a_server_that_does_not_answer() -> None:
    line = explain(NotTheMaster("READONLY You can't write against a read only replica."))
    assert "is a replica" in line
    assert "--redis-url (LLAMAQ_REDIS_URL)" in line


@pytest.mark.parametrize(
    ("scheme", "path"), [("rediss", ""), ("rediss+cluster", ""), ("rediss+sentinel", "/llamaq-master")]
)
async def test_a_failed_tls_connection_is_not_reported_as_a_server_that_does_not_answer(
    tmp_path: Path, scheme: str, path: str
) -> None:
    no_certificate = tmp_path / "ca.pem"
    no_certificate.write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}{path}?ssl_ca_certs={no_certificate}"
        redis = connect(url, name="test", failover_s=0)
        with pytest.raises(RedisConnectionError) as caught:
            await redis.ping()
        await redis.aclose()
    assert exit_code_of(caught.value) == 3
    assert explain(caught.value).startswith("Redis: no TLS connection: ")


async def test_a_sentinel_that_does_not_answer_is_named_with_its_reason() -> None:
    redis = connect("redis+sentinel://127.0.0.1:1/llamaq-master", name="test", failover_s=0)
    with pytest.raises(RedisConnectionError) as caught:
        await redis.ping()
    await redis.aclose()
    assert str(caught.value).startswith(
        "no Sentinel names a master 'llamaq-master': Error 111 connecting to 127.0.0.1:1."
    )


def test_the_documentation_lists_every_exit_code() -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    assert set(map(int, re.findall(r"^\| `([0-9]+)` \|", PAGE, re.MULTILINE))) == codes


def test_the_exit_codes_of_a_worker_agree_with_those_of_the_other_commands() -> None:
    assert worker_exit_codes.EXIT_OK == exit_codes.EXIT_OK
    assert worker_exit_codes.EXIT_CRASHED == exit_codes.EXIT_FAILED
    assert worker_exit_codes.EXIT_CANNOT_START == exit_codes.EXIT_USAGE
    assert worker_exit_codes.EXIT_FORCED == exit_codes.EXIT_INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x"),
        ("chat", "x"),
        ("submit", "x"),
        ("depth",),
        ("queues",),
        ("jobs",),
        ("purge", "--yes"),
        ("workers",),
        ("stats",),
        ("health",),
        ("dead", "list"),
        ("slots", "list"),
    ],
)
def test_every_command_says_in_one_line_how_to_start_a_redis_that_does_not_answer(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = failing(monkeypatch, capsys, *arguments, "--redis-url", "redis://127.0.0.1:1", code=3)
    assert "Redis does not answer: Error 111 connecting to 127.0.0.1:1" in error
    assert "Start one: llamaq up" in error
    assert "--redis-url (LLAMAQ_REDIS_URL)" in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("generate", "x", "--server", "http://localhost:abc"), "--server: 'http://localhost:abc' is not a URL"),
        (("generate", "x", "--server", "http://localhost:99999"), "--server: 'http://localhost:99999' is not a URL"),
        (("generate", "x", "--server", "http://"), "--server: 'http://' is not a URL"),
        (("generate", "x", "--server", "http://localhost:1", "--api-key", "schlüssel"), "--api-key"),
        (("keys", "add", "me", "--file", "missing/keys.json"), "--file: missing/keys.json cannot be written: No such"),
        (
            ("serve", "--http-port", "0", "--tls-cert", "missing.pem", "--tls-key", "missing.pem"),
            "tls_cert: there is no file missing.pem",
        ),
        (
            ("serve", "--http-port", "0", "--tls-cert", "no.pem", "--tls-key", "no.pem"),
            "tls_cert, tls_key: the files cannot be used",
        ),
    ],
)
def test_an_argument_that_cannot_be_used_is_reported_in_one_line(
    arguments: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("no.pem").write_text("no certificate")
    monkeypatch.setattr(serve_command, "configure_logging", lambda *_: None)
    assert complaint in failing(monkeypatch, capsys, *arguments, code=exit_codes.EXIT_USAGE)
