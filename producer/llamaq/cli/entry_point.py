"""The entry point of the `llamaq` command. It imports the commands late, so Ctrl-C during the imports prints no
traceback.
"""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

from llamaq.cli.exit_codes import EXIT_INTERRUPTED


def _exit(number: int, _: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP):  # another one must not interrupt the cancellation
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Import the commands, and run the called one. SIGTERM and SIGHUP cancel a job, as Ctrl-C does."""
    if {"generate", "chat", "embed", "rerank"}.intersection(sys.argv[1:2]):
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _exit)
    gc.disable()  # imports create objects that live until the exit, so a collection would free nothing
    try:
        from llamaq.cli.main import main as run

        gc.freeze()  # later collections, such as the one at the exit, skip these objects
        gc.enable()
        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
