"""The parts of the chat page's script that decide: Markdown, lost connections, the stored conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.node import run_node

pytestmark = pytest.mark.starts_processes

SCRIPT_TESTS = Path(__file__).parent / "page_script.mjs"


def test_the_script_of_the_page_passes_its_tests_in_node() -> None:
    report = run_node("--test-isolation=none", "--test-reporter=tap", "--test", str(SCRIPT_TESTS))
    assert "# fail 0" in report
