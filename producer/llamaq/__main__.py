"""`python -m llamaq` is the `llamaq` command."""

from __future__ import annotations

from llamaq.cli.entry_point import main

if __name__ == "__main__":
    main()
