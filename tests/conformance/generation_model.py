"""Writes the model that stands in for those of llama.cpp's tests: the demo model, which never ends an answer by itself.

The tests want answers of certain lengths. Their own models rarely end an answer, the demo model often does.
"""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.engine.model_files import resolve_model_file


def write_generation_model(path: Path) -> Path:
    """Write the model, and return its path."""
    demo = resolve_model_file(None)
    reader = gguf.GGUFReader(demo)
    writer = gguf.GGUFWriter(path, "llama")
    ends = sorted(Vocab.from_blob(extract_vocab(demo)).end_tokens)
    never = MetadataDetails(gguf.GGUFValueType.ARRAY, ends, "", gguf.GGUFValueType.INT32)
    copy_with_new_metadata(reader, writer, {"tokenizer.ggml.suppress_tokens": never}, [])
    return path
