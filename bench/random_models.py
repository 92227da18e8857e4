"""Models with random weights in the shape of named models, for benchmarks: `python bench/random_models.py qwen3-0.6b`.

A random model runs as fast as the named model, needs no download, and never stops before the requested length. Each
file is written once per checkout, in `.cache/models/`. The last line of output is JSON: name, bytes, path, and
seconds (close to 0 if the file existed).
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from llamaq.tools.random_gguf import CHATML, REVISION, Architecture, ModelSpec, Weights, write_model

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"
QWEN3_N_VOCAB = 151_936
QWEN3_N_CTX = 40_960


def _qwen3(n_layers: int, n_embd: int, n_ff: int, n_heads: int) -> ModelSpec:
    """Return the shape of a model of Qwen3, from its config.json."""
    return ModelSpec(
        Architecture.QWEN3,
        n_layers=n_layers,
        n_embd=n_embd,
        n_ff=n_ff,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        n_ctx=QWEN3_N_CTX,
        n_vocab=QWEN3_N_VOCAB,
        weights=Weights.Q8_0,
        chat_template=CHATML,
    )


TINY = ModelSpec(
    Architecture.QWEN3,
    n_layers=2,
    n_embd=64,
    n_ff=192,
    n_heads=2,
    n_kv_heads=1,
    head_dim=64,
    n_ctx=QWEN3_N_CTX,
    n_vocab=QWEN3_N_VOCAB,
    weights=Weights.F16,
    chat_template=CHATML,
)
QWEN3_600M = _qwen3(n_layers=28, n_embd=1024, n_ff=3072, n_heads=16)
SHAPES = MappingProxyType(
    {
        "tiny": TINY,
        "qwen3-0.6b": QWEN3_600M,
        # They write token t + 1 after token t.
        "tiny-counting": replace(TINY, counts=True),
        "qwen3-0.6b-counting": replace(QWEN3_600M, counts=True),
        # Its decode ticks wait for memory, as those of most models on a GPU do.
        "qwen3-0.6b-f16-counting": replace(QWEN3_600M, counts=True, weights=Weights.F16),
        # for GPUs
        "qwen3-1.7b": _qwen3(n_layers=28, n_embd=2048, n_ff=6144, n_heads=16),
        "qwen3-8b": _qwen3(n_layers=36, n_embd=4096, n_ff=12_288, n_heads=32),
    }
)


def ensure(name: str, directory: Path = CACHE) -> Path:
    """Return the file of a model. It is written if it does not exist. Raises ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"no model is named {name!r}; the names are {', '.join(SHAPES)}")
    return ensure_spec(name, SHAPES[name], directory)


def ensure_spec(name: str, spec: ModelSpec, directory: Path = CACHE, *, seed: int = 0) -> Path:
    """Return the file of a model with this specification. It is written if it does not exist."""
    fingerprint = hashlib.sha256(f"{REVISION} {seed} {spec!r}".encode()).hexdigest()[:8]
    path = directory / f"{name}-{fingerprint}.gguf"
    return path if path.exists() else write_model(path, spec, seed=seed)


def main(
    name: Annotated[str, typer.Argument(help=" | ".join(SHAPES))],
    out: Annotated[Path, typer.Option(help="Folder of the file.")] = CACHE,
) -> None:
    """Write a model with random weights in the shape of a named model."""
    start = time.perf_counter()
    try:
        path = ensure(name, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    seconds = time.perf_counter() - start
    print(json.dumps({"name": name, "bytes": path.stat().st_size, "seconds": round(seconds, 3), "path": str(path)}))


if __name__ == "__main__":
    typer.run(main)
