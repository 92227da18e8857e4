"""The entry point of the `llamaq` command. It imports the commands late, so Ctrl-C during the imports prints no
traceback.
"""

from __future__ import annotations

import gc
import sys

from llamaq.cli.exit_codes import EXIT_INTERRUPTED


def main() -> None:
    """Import the commands, and run the called one."""
    gc.disable()  # imports create objects that live until the exit, so a collection would free nothing
    try:
        from llamaq.cli.main import main as run

        gc.freeze()  # later collections, such as the one at the exit, skip these objects
        gc.enable()
        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
