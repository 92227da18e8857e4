"""The process that compiles the grammars of the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox


@pytest.fixture(scope="module")
def sandbox(vocab: Vocab) -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(vocab, timeout_s=3)
    yield sandbox
    sandbox.close()
