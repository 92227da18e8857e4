"""Uploads of forms that a client gets wrong by mistake or on purpose, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

MAX_FILE_BYTES = 64 * 1024
"""The setting `max_file_bytes` of an attacked server."""
BOUNDARY = "bound"
FILE_NAMES = (
    "rows.jsonl",
    "../../../../etc/passwd",
    "/etc/passwd",
    "..\\..\\windows\\system.ini",
    "C:\\rows.jsonl",
    "file:///etc/passwd",
    "a\x00b",
    "a\r\nX-Injected: 1",
    '"; filename="b',
    "x" * 20_000,
    "é😀",
    "",
    ".",
    "%2e%2e%2fetc",
    "$(reboot)",
    "CON",
)
CONTENT_TYPES = (
    "",
    "application/json",
    "application/octet-stream",
    "text/plain",
    "multipart/mixed; boundary=bound",
    "multipart/form-data",
    "multipart/form-data; boundary=",
    'multipart/form-data; boundary="bound',
    "multipart/form-data; boundary=" + "b" * 5000,
    "multipart/form-data; boundary=other",
    "multipart/form-data; boundary=bound; boundary=other",
    "multipart/form-data; charset=utf-16; boundary=bound",
    "multipart/form-data; boundary=\xff\xfe",
    "MULTIPART/FORM-DATA; BOUNDARY=bound",
    "multipart/form-data; boundary=bound; " + "x=y; " * 800,
)
EXPIRIES = ("", "0", "-1", "3600", "60", "1e9", "9" * 400, "NaN", "{}", "\x00")

Part = tuple[str, bytes]
"""The headers of a part, and its content."""
Upload = tuple[str, bytes]
"""The header `Content-Type`, and the body."""


def field_of(name: str, value: bytes) -> Part:
    """Return a field of a form."""
    return f'Content-Disposition: form-data; name="{name}"', value


def file_of(content: bytes, name: str = "rows.jsonl") -> Part:
    """Return the file of a form."""
    return f'Content-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: text/plain', content


def form_of(parts: Sequence[Part], end: bytes = b"--bound--\r\n") -> bytes:
    """Return the body of a form."""
    encoded = (f"--{BOUNDARY}\r\n{headers}\r\n\r\n".encode() + content + b"\r\n" for headers, content in parts)
    return b"".join(encoded) + end


def draw_upload(rng: random.Random) -> Upload:
    """Return the next upload. A tenth of them is valid."""
    kinds: Sequence[Callable[[random.Random], Upload]] = (_valid, _wrong_type, _wrong_parts, _wrong_headers, _damaged)
    return rng.choices(kinds, [10, 20, 30, 20, 20])[0](rng)


def rows(rng: random.Random) -> bytes:
    """Return an input file of a batch. Some of its lines are not valid."""
    bodies: Sequence[Any] = (
        {"prompt": "hi", "max_tokens": 2},
        {"prompt": {}},
        {"prompt": "x", "n": 3, "max_tokens": 1},
        [],
        None,
    )
    lines: list[bytes] = []
    for number in range(rng.randrange(6)):
        line = {"custom_id": str(number), "url": "/v1/completions", "body": rng.choice(bodies[: rng.randint(1, 5)])}
        lines.append(json.dumps(line).encode() if rng.random() < 0.9 else rng.randbytes(30))
    return b"\n".join(lines)


def _typed(body: bytes) -> Upload:
    return f"multipart/form-data; boundary={BOUNDARY}", body


def _valid(rng: random.Random) -> Upload:
    return _typed(form_of([field_of("purpose", b"batch"), file_of(rows(rng))]))


def _wrong_type(rng: random.Random) -> Upload:
    return rng.choice(CONTENT_TYPES), _valid(rng)[1]


def _wrong_parts(rng: random.Random) -> Upload:
    purpose, file = field_of("purpose", b"batch"), file_of(rows(rng))
    many = [field_of(f"field {number}", b"x") for number in range(rng.choice([14, 17, 2000]))]
    choices: Sequence[Sequence[Part]] = (
        [],
        [purpose],
        [file],
        [purpose, file, file],
        [purpose, purpose, file],
        [purpose, file, *many],
        [*many, purpose, file],
        [field_of("purpose", b"x" * rng.choice([5, 5000])), file],
        [field_of("purpose", b"\xff\xfe"), file],
        [purpose, field_of("expires_after[anchor]", b"created_at"), _expiry(rng), file],
        [_expiry(rng), purpose, file],
        [purpose, file_of(b"x" * rng.choice([MAX_FILE_BYTES + 1, 10 * MAX_FILE_BYTES]))],
        [purpose, file_of(rng.randbytes(2000), rng.choice(FILE_NAMES))],
    )
    return _typed(form_of(rng.choice(choices)))


def _expiry(rng: random.Random) -> Part:
    return field_of("expires_after[seconds]", rng.choice(EXPIRIES).encode())


def _wrong_headers(rng: random.Random) -> Upload:
    headers = (
        "",
        "Content-Disposition: form-data",
        "Content-Disposition: attachment; filename=x",
        "Content-Disposition: form-data; name=\"file\"; filename*=utf-8''%2e%2e%2fx",
        "Content-Disposition: form-data; name=file\r\nContent-Transfer-Encoding: base64",
        "Content-Disposition: form-data; name=file\r\nContent-Type: multipart/mixed; boundary=inner",
        "no colon",
        ": empty",
        "X: \x00",
        "X-Long: " + "x" * rng.choice([9000, 300_000]),
        "\r\n".join(f"X-{number}: y" for number in range(3000)),
        'Content-Disposition: form-data; name="' + "n" * 20_000 + '"',
        'Content-Disposition: form-data; name="file"; ' + "a=b; " * 3000,
    )
    return _typed(form_of([field_of("purpose", b"batch"), (rng.choice(headers), rows(rng))]))


def _damaged(rng: random.Random) -> Upload:
    kind, body = _valid(rng)
    damaged = bytearray(body)
    match rng.randrange(6):
        case 0:
            for _ in range(rng.randint(1, 6)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        case 1:
            damaged = damaged[: rng.randrange(len(damaged))]
        case 2:
            damaged = bytearray(body.replace(b"\r\n", b"\n"))
        case 3:
            damaged = bytearray(rng.randbytes(rng.choice([0, 3, 3000])))
        case 4:
            damaged += rng.randbytes(rng.choice([3, 3 * MAX_FILE_BYTES]))  # after the end of the form
        case _:
            damaged = bytearray(form_of([file_of(rows(rng))], end=b"--bound"))
    return kind, bytes(damaged)
