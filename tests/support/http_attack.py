"""Malformed, oversized, slow and half-closed HTTP requests and uploads, drawn from a seed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

from tests.support.bad_requests import BAD_HTTP, HEADERS, JUNK
from tests.support.bad_uploads import draw_upload

MAX_BODY_BYTES = 32 * 1024
"""The setting `max_body_bytes` of an attacked server."""
SLOW_S = 0.5
"""Longest pause of a slow client between two parts of its request."""
PATIENCE_S = 5.0
"""The settings `header_timeout_s` and `body_timeout_s` of an attacked server. A busy machine must not exceed them."""
ANSWER_S = 60.0
"""Longest time in which every request that is read to its end must be answered."""
ENDINGS = ("read", "half_close", "reset", "leave", "never_read")
"""What a client does after its last byte: read the answer, first close its own direction, reset the connection, close
it a moment later, or read nothing."""

ANSWERED = ("valid", "wrong fields", "broken JSON", "upload", "known object")
"""Kinds of attacks that the server answers if the client reads."""

SKELETONS: Mapping[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "hi"}], "model": None},
    "prompt": {"prompt": "hi"},
    "input": {"input": "hi"},
    "content": {"content": "hi"},
    "tokens": {"tokens": [1, 2, 3]},
    "input_file_id": {"input_file_id": None, "endpoint": "/v1/completions", "completion_window": "1h"},
}
"""Small bodies, by a field that the body of an endpoint has."""
NO_IDS = ("0", "x", "resp_x", "é", "a/b", "resp_q.0.1", str(10**30), "file-", "batch_", "..", "%00")
N_KNOWN_IDS = 60


@dataclass(frozen=True)
class Attack:
    """One connection: the bytes that are sent, with a pause before each part but the first, and how it ends."""

    kind: str
    parts: Sequence[bytes]
    ending: str
    pause_s: float = 0.0

    def __repr__(self) -> str:
        return f"<Attack {self.kind} {self.ending} {b''.join(self.parts)[:400]!r}>"


@dataclass(eq=False)
class Attacker:
    """Draws attacks on the endpoints that a server describes in its `/openapi.json`."""

    description: Mapping[str, Any]
    queue: str
    rng: random.Random
    _operations: list[tuple[str, str, dict[str, Any] | None]] = field(init=False)
    """Method, path and schema of the body of each operation."""
    _names: list[str] = field(init=False)
    """The names of all fields of all bodies."""
    _known: deque[str] = field(init=False, default_factory=lambda: deque(maxlen=N_KNOWN_IDS))
    """The ids of the newest files, batches and responses."""

    def __post_init__(self) -> None:
        schemas = self.description["components"]["schemas"]
        self._operations = list(_operations(self.description["paths"], schemas))
        self._names = sorted({name for schema in schemas.values() for name in schema.get("properties", {})})

    def draw(self) -> Attack:
        """Return the next attack."""
        draws = {
            self._valid: 10,
            self._wrong_fields: 45,
            self._broken_json: 15,
            self._bad_http: 15,
            self._large: 8,
            self._slow: 7,
            self._upload: 20,
            self._known_object: 15,
        }
        return self.rng.choices(list(draws), list(draws.values()))[0]()

    def learn(self, answer: bytes) -> None:
        """Remember the ids of files, batches and responses in an answer. Later attacks name them."""
        self._known.extend(found.decode() for found in re.findall(rb'"id":\s*"((?:file-|batch_|resp_)[^"]+)"', answer))

    def _valid(self) -> Attack:
        return Attack("valid", [self._request(*self._body())], self.rng.choice(ENDINGS))

    def _wrong_fields(self) -> Attack:
        method, path, body = self._body()
        for _ in range(self.rng.randint(1, 4)):
            names = list(body) if body and self.rng.random() < 0.3 else self._names
            body[self.rng.choice(names)] = self.rng.choice(JUNK)
        ending = "read" if self.rng.random() < 0.7 else self.rng.choice(ENDINGS)
        return Attack("wrong fields", [self._request(method, path, body)], ending)

    def _broken_json(self) -> Attack:
        method, path, body = self._body()
        text = bytearray(json.dumps(body).encode())
        for _ in range(self.rng.randint(1, 5)):
            text[self.rng.randrange(len(text))] = self.rng.randrange(256)
        if self.rng.random() < 0.3:
            text = text[: self.rng.randrange(len(text))]
        if self.rng.random() < 0.1:
            text = bytearray(self.rng.choice([b"[" * 20_000, b'{"a":' * 5000, b"NaN", b"\xff\xfe", b"1e99999"]))
        return Attack("broken JSON", [_post(method, path, bytes(text))], "read")

    def _bad_http(self) -> Attack:
        data = self.rng.choice(BAD_HTTP)
        if self.rng.random() < 0.3:
            data = self.rng.randbytes(self.rng.randrange(1, 400))
        return Attack("bad HTTP", [data], self.rng.choice(["half_close", "reset", "leave"]))

    def _large(self) -> Attack:
        size = self.rng.choice([MAX_BODY_BYTES + 1, 2 * MAX_BODY_BYTES, 40 * MAX_BODY_BYTES])
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        if self.rng.random() < 0.5:
            expect = "Expect: 100-continue\r\n" if self.rng.random() < 0.3 else ""
            data = f"{head}{expect}Content-Length: {size}\r\n\r\n".encode() + b"x" * size
        else:
            chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
            data = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * (size // 4096 + 1) + b"0\r\n\r\n"
        return Attack("oversized", [data], self.rng.choice(["read", "half_close", "reset", "leave"]))

    def _upload(self) -> Attack:
        """Return the upload of a file. It may be cut off, slow, or as large as no request may be."""
        kind, body = draw_upload(self.rng)
        lines = ["POST /v1/files HTTP/1.1", "Host: x", "Connection: close", f"Content-Type: {kind}"]
        if is_chunked := self.rng.random() < 0.2:
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in _parts_of(body)) + b"0\r\n\r\n"
        lines.append("Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}")
        data = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        if self.rng.random() < 0.2:
            data = data[: self.rng.randrange(len(data))]
            return Attack("upload that is cut off", [data], self.rng.choice(["half_close", "reset", "leave"]))
        if self.rng.random() < 0.1:
            middle = self.rng.randrange(1, len(data))
            return Attack("slow upload", [data[:middle], data[middle:]], "read", self.rng.uniform(0, SLOW_S))
        return Attack("upload", [data], "read" if self.rng.random() < 0.8 else self.rng.choice(ENDINGS))

    def _known_object(self) -> Attack:
        """Return a request for a file, batch or response that exists, or that another attack deletes."""
        known = self._pick(["file-x", *self._known])
        path = f"/v1/{'files' if known[:1] == 'f' else 'batches' if known[:1] == 'b' else 'responses'}"
        body = json.dumps({**SKELETONS["input_file_id"], "input_file_id": known}).encode()
        calls = {
            ("GET", f"{path}/{known}"): 3,
            ("GET", f"{path}/{known}/content"): 3,
            ("GET", f"{path}/{known}?stream=true&starting_after={self.rng.randint(-2, 9)}"): 1,
            ("GET", f"{path}?limit={self.rng.choice([0, 1, 3, 'x'])}&after={known}&order=desc"): 2,
            ("DELETE", f"{path}/{known}"): 1,
            ("POST", f"{path}/{known}/cancel"): 1,
            ("POST", "/v1/batches"): 4,
        }
        method, target = self.rng.choices(list(calls), list(calls.values()))[0]
        sent = body if target == "/v1/batches" else b""
        return Attack("known object", [_post(method, target, sent)], self.rng.choice(("read", "read", *ENDINGS)))

    def _slow(self) -> Attack:
        whole = self._request(*self._body())
        cuts = sorted(self.rng.sample(range(1, len(whole)), min(len(whole) - 1, self.rng.randint(1, 4))))
        parts = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        if self.rng.random() < 0.5:
            parts.pop()  # the request never ends
        return Attack("slow", parts, self.rng.choice(ENDINGS), self.rng.uniform(0, SLOW_S))

    def _pick(self, ids: Sequence[str]) -> str:
        """Return one of the ids. Exactly one random number is drawn, so the later draws do not depend on the number of
        ids.
        """
        return ids[int(self.rng.random() * len(ids))]

    def _body(self) -> tuple[str, str, dict[str, Any]]:
        """Return the method, the path and a body without mistakes for one operation."""
        method, path, schema = self.rng.choice(self._operations)
        path = re.sub(
            r"\{(\w+)\}",
            lambda _: quote(self._pick([*NO_IDS, *self._known])),
            path,
        )
        properties = (schema or {}).get("properties", {})
        body: dict[str, Any] = next((dict(one) for name, one in SKELETONS.items() if name in properties), {})
        if "model" in body:
            body["model"] = self.queue
        if "input_file_id" in body:
            body["input_file_id"] = self._pick(["file-x", *self._known])
        body |= {name: self.rng.randint(1, 6) for name in ("max_tokens", "max_output_tokens") if name in properties}
        return method, path, body | ({"stream": self.rng.random() < 0.5} if "stream" in properties else {})

    def _request(self, method: str, path: str, body: dict[str, Any]) -> bytes:
        headers = self.rng.sample(HEADERS, 2) if self.rng.random() < 0.2 else ()
        return _post(method, path, json.dumps(body).encode() if method == "POST" else b"", headers)


def _parts_of(body: bytes) -> list[bytes]:
    """Return the chunks of a body."""
    return [body[start : start + 1000] for start in range(0, len(body), 1000)]


def _operations(
    paths: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            yield method.upper(), path, schemas.get(name)


def _post(method: str, path: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def run_attack(url: str, attack: Attack, patience_s: float = 0.2) -> bytes:
    """Run an attack, and return what the server answered.

    Args:
        url: The URL of the server.
        attack: The attack.
        patience_s: How long a client that leaves, or that never reads, keeps its connection after its last byte.

    Raises:
        TimeoutError: A client that reads got no end of the answer.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    answer = bytearray()
    try:
        await _send(writer, attack)
        if attack.ending in ("read", "half_close"):
            async with asyncio.timeout(ANSWER_S):
                while data := await reader.read(64 * 1024):
                    answer += data
        else:
            if attack.ending == "never_read":
                writer.transport.pause_reading()  # type: ignore[attr-defined]  # the transport of a socket can
            await asyncio.sleep(0 if attack.ending == "reset" else patience_s)
    except OSError as exc:  # the server may close a connection in the middle of a request
        if isinstance(exc, TimeoutError):
            raise
    finally:
        if attack.ending == "reset":
            _reset_at_close(writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return bytes(answer)


async def _send(writer: asyncio.StreamWriter, attack: Attack) -> None:
    for number, part in enumerate(attack.parts):
        if number and attack.pause_s:
            await asyncio.sleep(attack.pause_s)
        writer.write(part)
        if attack.ending != "never_read":
            await writer.drain()
    if attack.ending == "half_close":
        writer.write_eof()


def _reset_at_close(writer: asyncio.StreamWriter) -> None:
    """Let the close of a connection send a reset: with SO_LINGER of 0 s."""
    raw = writer.get_extra_info("socket")
    with suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def statuses_of(answer: bytes) -> list[int]:
    """Return the statuses of the responses in an answer."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def complaint_about(attack: Attack, answer: bytes) -> str | None:
    """Return what is wrong with an answer. None: nothing is."""
    statuses = statuses_of(answer)
    if any(status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED for status in statuses):
        return f"a status from 500 on: {attack!r}: {answer[:600]!r}"
    if b"a defect of the server" in answer:
        return f"an event that tells of a defect: {attack!r}: {answer[-600:]!r}"
    if not statuses and attack.ending == "read" and attack.kind in ANSWERED:
        return f"no answer: {attack!r}"
    return None
