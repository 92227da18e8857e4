"""The HTTP server has more connections than the soft limit of open files, which is often 1024."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tests.lifecycle.conftest import LLAMAQ

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

SOFT_LIMIT = 60
N_CONNECTIONS = 100


def test_the_soft_limit_of_open_files_does_not_bound_the_connections(environment: Environment) -> None:
    limited = ["bash", "-c", f'ulimit -Sn {SOFT_LIMIT} && exec "$0" "$@"', sys.executable, str(LLAMAQ)]
    variables = {"LLAMAQ_REDIS_URL": environment.redis_url, "LLAMAQ_QUEUE": environment.queue}
    server = environment.run([*limited, "serve", "--http-port", "0"], **variables)
    address = urlsplit(server.await_output(r"http\.ready url=(http://\S+)")[1])
    with ExitStack() as stack:
        for _ in range(N_CONNECTIONS):
            connection = socket.create_connection((address.hostname, address.port), timeout=10)
            stack.enter_context(connection)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in connection.recv(4096)
