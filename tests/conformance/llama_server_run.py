"""What llama-server itself did in the same tests with the same models: the file `llama_server.json`.

`make conformance SERVER=llama-server` writes it, and every run against `llamaq serve` is compared with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.conformance.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class LlamaServerRun:
    """The outcomes of llama-server."""

    passed: frozenset[str]
    """The ids of the tests that pass against llama-server."""
    token_counts: Mapping[str, Sequence[int]]
    """The numbers of prompt tokens that llama-server returned, by the id of the test that checks them."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Self:
        """Return the run with these outcomes."""
        return cls(
            frozenset(each.test for each in outcomes if each.outcome == "passed"),
            {each.test: each.token_counts for each in outcomes if each.token_counts},
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the run that a file describes."""
        values = json.loads(path.read_text())
        return cls(frozenset(values["passed"]), values["token_counts"])

    def write(self, path: Path) -> None:
        """Write the run to a file."""
        counts = {test: list(self.token_counts[test]) for test in sorted(self.token_counts)}
        path.write_text(json.dumps({"passed": sorted(self.passed), "token_counts": counts}, indent=1) + "\n")
