"""Fixtures of the tests of the lower cache tiers."""

from __future__ import annotations

import pytest
from tests.support.disk_blocks import Warnings


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warnings:
    """The warnings and errors that the test causes."""
    return Warnings(caplog)
