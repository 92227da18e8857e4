"""The errors of llamaq form one tree, which the docstring of their module shows in full."""

from __future__ import annotations

import inspect
import re

from llamaq.common import errors


def test_the_docstring_shows_every_error_and_no_other() -> None:
    shown = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    defined = [name for name, value in vars(errors).items() if inspect.isclass(value) and value is not errors.ErrorCode]
    assert ["LlamaqError", *shown] == [name for name in defined if name != "StrEnum"]


def test_every_error_is_a_llamaq_error() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert issubclass(value, errors.LlamaqError), name
