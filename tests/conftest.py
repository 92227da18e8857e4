"""Fixtures of all tests: one redis-server for the session, a new queue for each test. Also runs `async def` tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import secrets
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import PoolingType
from hypothesis import HealthCheck, settings
from tests.support.distribution import check_groups, distribute
from tests.support.lazy_import import LazyPackage
from tests.support.ports import reserve_port
from tests.support.quick import guard_quick_test, has_quick_tests, install_audit_hook, is_quick

import llamaq.worker
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.tools.random_gguf import CHATML, EXPERTS, MEMORY_KINDS, PLAIN, write_model
from llamaq.tools.random_gguf.bert_model import write_bert
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.local.embedded_redis import EmbeddedRedis

ASYNC_TEST_TIMEOUT_S = 120
REFUSED = "refused"
"""Under this name, an xdist worker tells the main process why it runs no test."""
CHILD_PROCESSES = Path(__file__).parent / "support" / "child_processes"
"""Folder whose `sitecustomize.py` is imported by each Python process that a test starts."""

# Hypothesis gets no time limits, because a busy machine exceeds them. In CI, Hypothesis draws the same examples in each
# run. `make test-quick` tries fewer examples.
unlimited = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", unlimited, max_examples=50)
settings.register_profile("quick", unlimited, max_examples=20)
settings.load_profile("full")


def pytest_configure() -> None:
    # A shell lets its background jobs ignore SIGINT, and the processes that tests start would inherit this.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    install_audit_hook()
    make_process_starts_cheap()
    hide_gpus()


def pytest_unconfigure() -> None:
    """Close the two files that `llama_cpp` opens when it is imported. Python would warn of them at its end."""
    if opened := sys.modules.get("llama_cpp._utils"):
        opened.outnull_file.close()
        opened.errnull_file.close()


def hide_gpus() -> None:
    """Let llama.cpp see no GPU, unless `make test-gpu` runs: some tests compare with the figures of a CPU."""
    if "LLAMAQ_TEST_GPU" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def make_process_starts_cheap() -> None:
    """Set environment variables that spare the hundreds of Python processes of the tests some imports."""
    paths = [str(CHILD_PROCESSES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # pydantic reads the metadata of all installed distributions
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing it downloads a list of prices


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    only_quick = config.option.markexpr == "quick" and collection_path.is_relative_to(config.rootpath)
    return (only_quick and collection_path.is_file() and not has_quick_tests(collection_path, config.rootpath)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and let it skip everything that exists then: all modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_other_devices = "gpu" if "LLAMAQ_TEST_GPU" not in os.environ else "cpu"
    items[:] = [item for item in items if item.get_closest_marker(of_other_devices) is None]
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
    if getattr(config.option, "loadgroup", False):  # pytest-xdist sets this variable in its workers
        distribute(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not getattr(session.config.option, "loadgroup", False):
        return
    try:
        check_groups(session.items)
    except pytest.UsageError as exc:
        session.config.workeroutput[REFUSED] = str(exc)  # type: ignore[attr-defined]  # pytest-xdist sets this attribute
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """End the run with the error of an xdist worker that has refused the tests. pytest-xdist would not show it."""
    if message := getattr(node, "workeroutput", {}).get(REFUSED):
        pytest.exit(message, returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Import the slow packages of the test's module."""
    for each in vars(getattr(item, "module", None) or object).values():
        if type(each) is LazyPackage:
            each.load()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in a new event loop, with a time limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def bounded() -> None:
        async with asyncio.timeout(ASYNC_TEST_TIMEOUT_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("quick") is None:
        return (yield)
    with guard_quick_test(item.nodeid):
        return (yield)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A redis-server that stores no data on disk. Fails if none is installed: tests with Redis are never skipped."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def queue() -> str:
    """A queue name that no other test uses, because all tests share one Redis."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 on which no server listens. No other test uses it."""
    return reserve_port()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The path of the shipped demo model."""
    return Path(next(iter(llamaq.worker.__path__))) / "model" / "llamaq-demo.gguf"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a random-weight model whose chat template neither writes BOS nor trims contents."""
    return write_model(tmp_path_factory.mktemp("chat") / "chat.gguf", replace(PLAIN, chat_template=CHATML))


@pytest.fixture(scope="session")
def tag_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a model with tags: `[TOOL_CALLS]` is a control token, those of Qwen are user-defined tokens."""
    qwen = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    spec = replace(PLAIN, control_tags=("[TOOL_CALLS]",), user_defined_tags=qwen)
    return write_model(tmp_path_factory.mktemp("tags") / "tags.gguf", spec)


@pytest.fixture(scope="session", params=sorted(MEMORY_KINDS))
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a random-weight model. The test runs once for each memory kind of llama.cpp."""
    kind: str = request.param
    return write_model(tmp_path_factory.mktemp("kinds") / f"{kind}.gguf", MEMORY_KINDS[kind], seed=3)


@pytest.fixture(scope="session")
def expert_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a model with a mixture of experts in each of its three layers."""
    return write_model(tmp_path_factory.mktemp("experts") / "experts.gguf", replace(EXPERTS, n_layers=3))


@pytest.fixture(scope="session")
def bert_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a random model for embeddings, which reads texts in both directions. Its pooling is `cls`."""
    return write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf", n_ctx=64)


@pytest.fixture(scope="session")
def rerank_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a random model for reranking."""
    return write_bert(tmp_path_factory.mktemp("bert") / "rerank.gguf", pooling=PoolingType.RANK, has_head=True)


@pytest.fixture(scope="session")
def vocab(demo_model: Path) -> Vocab:
    return Vocab.from_blob(extract_vocab(demo_model))


@pytest.fixture(scope="session")
def tag_vocab(tag_model: Path) -> Vocab:
    return Vocab.from_blob(extract_vocab(tag_model))


@pytest.fixture(scope="session")
def chat_vocab(chat_model: Path) -> Vocab:
    return Vocab.from_blob(extract_vocab(chat_model))
