"""How llguidance compiles a JSON schema, in a constraint of its own and inside a grammar."""

from __future__ import annotations

from typing import Any

SCHEMA_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r" |\n[ \t]{0,20}",  # without a bound, some models write white space without end
    "json_allowed_escapes": 'nrbtf\\"',  # with `u`, an additional key may be an escaped name of `properties`
}
"""The options that llamaq sets. In a schema inside a grammar they are the value of `x-guidance`."""
