"""Stands in for llama-server: asks the stack host for a server with the flags of llama-server, and ends with it.

llama.cpp's tests start this program with the flags of llama-server, and stop it with SIGTERM. It uses the standard
library alone, so that it starts quickly. The variable `LLAMAQ_CONFORMANCE_SOCKET` names the socket of the stack host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from types import FrameType


def main() -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["LLAMAQ_CONFORMANCE_SOCKET"])

        def ask_to_stop(_: int, __: FrameType | None) -> None:
            connection.shutdown(socket.SHUT_WR)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask_to_stop)
        request = {"flags": sys.argv[1:], "folder": os.getcwd()}  # noqa: PTH109  # pathlib is slow to import
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = connection.recv(4096)  # nothing: the server has ended
        if answer:
            sys.stderr.write(answer.decode() + "\n")
    return 1 if answer else 0


if __name__ == "__main__":
    sys.exit(main())
