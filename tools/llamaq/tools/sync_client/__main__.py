"""Writes `llamaq/producer/sync.py`; with --check, exits with 1 if the file is not up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llamaq.tools.sync_client.generator import SYNC_PATH, generate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m llamaq.tools.sync_client", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is not up to date")
    options = parser.parse_args(arguments)
    text = generate()
    if not options.check:
        SYNC_PATH.write_text(text)
        return 0
    if SYNC_PATH.read_text() == text:
        return 0
    print(f"{SYNC_PATH} is not up to date; run: {parser.prog}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
