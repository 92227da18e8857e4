"""The examples of README.md."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def block(name: str, language: str = "python") -> str:
    """Return the block that follows the comment `<!-- test: NAME -->`."""
    (found,) = re.findall(rf"<!-- test: {name} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    return str(found)
