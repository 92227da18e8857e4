"""Turns `AsyncClient`, `AsyncJob` and `AsyncStream` into `Client`, `Job` and `Stream`.

Each public method keeps its signature and docstring. Its body is one call through the portal, see `BlockingClient`.
Other members (the constructors of `Job` and `Stream`, `close`, `Stream.started`, the context managers) are written by
hand in `blocking_base.py`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

Method = ast.FunctionDef | ast.AsyncFunctionDef

PRODUCER = Path(__file__).parents[4] / "producer" / "llamaq" / "producer"
SYNC_PATH = PRODUCER / "sync.py"

HEADER = '''"""The client for threads: every method runs the same method of the asyncio client and waits for it."""

# Generated from client.py, job.py and async_stream.py by `python -m llamaq.tools.sync_client`: edit those files.

from __future__ import annotations

from collections.abc import Generator

from llamaq.producer.blocking_base import BlockingClient, BlockingJob, BlockingStream
'''
SYNC_NAMES = {"AsyncClient": "Client", "AsyncJob": "Job", "AsyncStream": "Stream"}
DOCSTRING_WORDS = {**SYNC_NAMES, "async with": "with", "async for": "for", "await client": "client", "aclose": "close"}
ASYNC_SENTENCE = "One client serves any number of concurrent calls, in one event loop at a time."
SYNC_SENTENCE = """Threads may share one client, and a child process may use it after a fork. The first call starts a
    thread, which `close` ends."""
"""Replaces `ASYNC_SENTENCE` in the docstring of `Client`."""


def generate() -> str:
    """Return the text of `sync.py`, formatted by ruff."""
    client = ast.parse((PRODUCER / "client.py").read_text())
    job = ast.parse((PRODUCER / "job.py").read_text())
    stream = ast.parse((PRODUCER / "async_stream.py").read_text())
    parts = [
        HEADER,
        *_imports(client, "llamaq.producer.client"),
        *_imports(job, "llamaq.producer.job"),
        *_imports(stream, "llamaq.producer.async_stream"),
        _sync_class(_class(client, "AsyncClient"), "BlockingClient"),
        _sync_class(_class(job, "AsyncJob"), "BlockingJob"),
        _sync_class(_class(stream, "AsyncStream"), "BlockingStream"),
    ]
    # The imports of both modules are copied as they are: ruff removes the unused ones and sorts the others.
    text = _ruff("\n".join(parts), "check", "--quiet", "--fix", "--select", "F401,F811,I")
    return _ruff(text, "format", "--quiet")


def _imports(module: ast.Module, name: str) -> Iterator[str]:
    """Yield the imports of a module, and an import of the names that the module itself defines."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            yield f"from {name} import {node.name}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield f"from {name} import {node.targets[0].id}"


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def _sync_class(source: ast.ClassDef, base: str) -> str:
    methods = [_sync_method(method, source.name) for method in _forwarded_methods(source)]
    docstring = _translate_docstring(ast.get_docstring(source, clean=False) or "")
    head = f'class {SYNC_NAMES[source.name]}({base}):\n    """{docstring}"""\n\n'
    return head + "".join(_attributes(source)) + "\n\n".join(methods)


def _attributes(source: ast.ClassDef) -> Iterator[str]:
    """Yield the declarations of the attributes of a class, each with its docstring."""
    for node, docstring in pairwise(source.body):
        if isinstance(node, ast.AnnAssign):
            declared = f"{ast.unparse(node.target)}: {_translate_annotation(ast.unparse(node.annotation))}"
            yield f"    {declared}\n    {ast.unparse(docstring)}\n\n"


def _forwarded_methods(source: ast.ClassDef) -> Iterator[Method]:
    """Yield the methods that the blocking class gets: the public ones, and the constructor of the client."""
    for node in source.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
            continue  # a property gives access to asyncio objects
        is_public = not node.name.startswith("_") and node.name not in ("aclose", "started")
        if is_public or (node.name == "__init__" and source.name == "AsyncClient"):
            yield node


def _sync_method(source: Method, class_name: str) -> str:
    returns = ast.unparse(source.returns) if source.returns else "None"
    docstring = ast.get_docstring(source, clean=False)
    lines = [f"def {source.name}({ast.unparse(source.args)}) -> {_translate_annotation(returns)}:"]
    if docstring:
        lines.append(f'    """{_translate_docstring(docstring)}"""')
    lines += [f"    {line}" for line in _body(source, class_name, returns)]
    return "\n".join(f"    {line}" for line in lines)


def _body(source: Method, class_name: str, returns: str) -> list[str]:
    """Return the statements of a method: one call through the portal."""
    arguments = _forwarded_arguments(source.args)
    if source.name == "__init__":
        return [f"super().__init__({class_name}({arguments}))"]
    if returns == "AsyncJob" and isinstance(source, ast.FunctionDef):  # this method needs no event loop
        return [f"return Job(self, {arguments})"]
    target = SYNC_NAMES[class_name].lower()
    call = f"lambda {target}: {target}.{source.name}({arguments})"
    if returns.startswith("AsyncGenerator["):
        return [f"return self._iterate({call})"]
    if returns == "AsyncStream":
        return [f"return Stream(self, self._open({call}), Job)"]
    if returns == "AsyncJob":
        return [f"job = self._call({call})", "return Job(self, job.id, is_new=job.is_new, is_shared=job.is_shared)"]
    if returns == "tuple[AsyncJob, ...]":
        made = "Job(self, job.id, is_new=job.is_new, is_shared=job.is_shared)"
        return [f"return tuple({made} for job in self._call({call}))"]
    return [f"self._call({call})" if returns == "None" else f"return self._call({call})"]


def _forwarded_arguments(signature: ast.arguments) -> str:
    """Return the arguments of a call that forwards every parameter."""
    passed = [parameter.arg for parameter in signature.args[1:]]
    passed += [f"{parameter.arg}={parameter.arg}" for parameter in signature.kwonlyargs]
    if signature.kwarg is not None:
        passed.append(f"**{signature.kwarg.arg}")
    return ", ".join(passed)


def _translate_annotation(annotation: str) -> str:
    annotation = re.sub(r"^AsyncGenerator\[(.*), None\]$", r"Generator[\1, None, None]", annotation)
    annotation = annotation.replace("tuple[AsyncJob,", "tuple[Job,")
    return SYNC_NAMES.get(annotation, annotation)


def _translate_docstring(text: str) -> str:
    text = text.replace(ASYNC_SENTENCE, SYNC_SENTENCE)
    for word, replacement in DOCSTRING_WORDS.items():
        text = re.sub(rf"\b{word}\b", replacement, text)
    return text


def _ruff(text: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(SYNC_PATH), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ruff {arguments[0]} failed: {done.stdout}{done.stderr}")
    return done.stdout
