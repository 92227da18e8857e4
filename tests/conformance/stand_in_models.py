"""Writes the models that stand in for those of llama.cpp's tests, which would have to be downloaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import gguf
from gguf import PoolingType
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.tools.random_gguf.bert_model import write_bert
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.engine.model_files import resolve_model_file


@dataclass(frozen=True, slots=True)
class StandInModels:
    """The files of the models. llama-server and `llamaq serve` load the same ones."""

    generation: Path
    """The demo model, which never ends an answer by itself. The tests want answers of certain lengths: their own models
    rarely end an answer, the demo model often does."""
    embedding: Path
    """A random model for embeddings, of the architecture and the pooling of the tests' model."""
    reranking: Path
    """A random model that scores documents."""

    @classmethod
    def write(cls, folder: Path) -> Self:
        """Write the models to a folder."""
        return cls(
            _write_generation_model(folder / "generation.gguf"),
            write_bert(folder / "embedding.gguf", pooling=PoolingType.CLS),
            write_bert(folder / "reranking.gguf", pooling=PoolingType.RANK, has_head=True),
        )

    def to_json(self) -> dict[str, str]:
        """Return the paths by the names of the models."""
        return {name: str(path) for name, path in asdict(self).items()}


def _write_generation_model(path: Path) -> Path:
    demo = resolve_model_file(None)
    reader = gguf.GGUFReader(demo)
    writer = gguf.GGUFWriter(path, "llama")
    ends = sorted(Vocab.from_blob(extract_vocab(demo)).end_tokens)
    never = MetadataDetails(gguf.GGUFValueType.ARRAY, ends, "", gguf.GGUFValueType.INT32)
    copy_with_new_metadata(reader, writer, {"tokenizer.ggml.suppress_tokens": never}, [])
    return path
