"""Writes the tables of README.md and docs/*.md; with --check, exits with 1 if a table is not up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llamaq.tools.docs_tables.documents import documents, fill_in


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m llamaq.tools.docs_tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is not up to date")
    options = parser.parse_args(arguments)
    stale = 0
    for path in documents():
        text = path.read_text()
        new_text = fill_in(text, str(path))
        if new_text == text:
            continue
        if options.check:
            print(f"{path}: a table is not up to date; run: {parser.prog}", file=sys.stderr)
            stale += 1
        else:
            path.write_text(new_text)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
