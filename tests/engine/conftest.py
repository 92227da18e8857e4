"""Model files: the one that ships, random ones of every memory kind, and vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import llamaq.worker
from llamaq.common.vocab import Vocab
from llamaq.tools.random_gguf import CHATML, MEMORY_KINDS, PLAIN, write_model
from llamaq.worker.vocab_blob import extract


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small trained model."""
    return Path(next(iter(llamaq.worker.__path__))) / "model" / "llamaq-demo.gguf"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a template that neither writes BOS nor trims contents."""
    return write_model(tmp_path_factory.mktemp("chat") / "chat.gguf", replace(PLAIN, chat_template=CHATML))


@pytest.fixture(scope="session", params=sorted(MEMORY_KINDS))
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, once for each kind of memory."""
    kind: str = request.param
    return write_model(tmp_path_factory.mktemp("kinds") / f"{kind}.gguf", MEMORY_KINDS[kind], seed=3)


@pytest.fixture(scope="session")
def vocab(demo_model: Path) -> Iterator[Vocab]:
    vocab = Vocab.from_blob(extract(demo_model))
    yield vocab
    vocab.close()


@pytest.fixture(scope="session")
def chat_vocab(chat_model: Path) -> Iterator[Vocab]:
    vocab = Vocab.from_blob(extract(chat_model))
    yield vocab
    vocab.close()
