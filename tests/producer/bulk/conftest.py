"""The rows that most bulk runs of the tests compute."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.bulk_runs import Rows


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path, *({"id": f"row {n}", "prompt": f"prompt {n}"} for n in range(1, 31)))
