"""The errors of llamaq form one tree, which the docstring of their module shows in full."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
import re
from concurrent.futures import ProcessPoolExecutor
from http import HTTPStatus
from typing import Any

import pytest

import llamaq
from llamaq.common import errors


def test_the_docstring_shows_every_error_and_no_other() -> None:
    shown = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    defined = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    assert ["LlamaqError", *shown] == defined


def test_every_error_is_a_llamaq_error() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert issubclass(value, errors.LlamaqError), name


def every_error() -> list[errors.LlamaqError]:
    """Return one error of each class in the tree."""
    for module in pkgutil.walk_packages(llamaq.__path__, "llamaq."):
        if module.name.startswith(("llamaq.common", "llamaq.producer", "llamaq.gateway", "llamaq.worker")):
            importlib.import_module(module.name)
    kinds, found = [errors.LlamaqError], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found.append(example_of(kind))
    return found


def example_of(kind: type[errors.LlamaqError]) -> errors.LlamaqError:
    if not inspect.isfunction(kind.__init__):  # the constructor of a built-in exception
        return kind("a message")
    examples: dict[str, Any] = {"str": "text", "int": 3, "float": 1.5, "ErrorCode": errors.ErrorCode.INTERNAL}
    examples["HTTPStatus"] = HTTPStatus.CONFLICT
    examples |= dict.fromkeys(("tuple[str,", "tuple[str", "tuple[Exception"), ("text",)) | {"Exception": "text"}
    parameters = [each for each in inspect.signature(kind).parameters.values() if each.kind is not each.KEYWORD_ONLY]
    return kind(*[examples[parameter.annotation.split(" ")[0]] for parameter in parameters if parameter.name != "host"])


def parts_of(error: errors.LlamaqError) -> list[Any]:
    values: list[Any] = [type(error), str(error), error.args, vars(error)]
    return [*values, error.msg if isinstance(error, ImportError) else None]


def test_every_error_survives_pickling_and_copying() -> None:
    found = every_error()
    assert len(found) >= 16
    for error in found:
        error.add_note("a note")
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert parts_of(pickle.loads(pickle.dumps(error, protocol))) == parts_of(error)
        assert parts_of(copy.copy(error)) == parts_of(error)
        assert parts_of(copy.deepcopy(error)) == parts_of(error)


@pytest.mark.starts_processes
def test_a_process_pool_survives_an_error_and_returns_it() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        code = "from llamaq.common.errors import JobFailed; raise JobFailed('internal', 'it broke', 'default.0.1')"
        with pytest.raises(errors.JobFailed) as caught:
            pool.submit(exec, code).result()
        assert (caught.value.code, caught.value.message, caught.value.job_id) == ("internal", "it broke", "default.0.1")
        code = "from llamaq.common.errors import QueueFull; raise QueueFull('default', 5, 4, 1.5)"
        with pytest.raises(errors.QueueFull, match="5 jobs wait") as full:
            pool.submit(exec, code).result()
        assert (full.value.depth, full.value.estimated_wait_s) == (5, 1.5)


@pytest.mark.parametrize(("wait_s", "seconds"), [(None, 1), (0.2, 1), (1.2, 2), (1e9, 600)])
def test_queue_full_says_after_which_whole_seconds_to_try_again(wait_s: float | None, seconds: int) -> None:
    assert errors.QueueFull("default", 5, 4, wait_s).retry_after_s == seconds
