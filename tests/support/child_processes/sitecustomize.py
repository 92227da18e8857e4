"""Python imports this module at the start of each process that a test starts: `tests/conftest.py` sets PYTHONPATH.

redis-py imports the metrics of opentelemetry-sdk if that is installed. This takes a tenth of a second of each process,
and no test uses these metrics.
"""

from __future__ import annotations

import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules["opentelemetry.sdk.metrics"] = None  # its import raises an ImportError
