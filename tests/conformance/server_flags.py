"""Translates the flags of llama-server to the settings of a worker and of `llamaq serve`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.stand_in_models import StandInModels

CHAT_TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] "
    "+ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "command-r": "{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' + {'system': '<|SYSTEM_TOKEN|>', 'user': "
    "'<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m['role']] + m['content'] + '<|END_OF_TURN_TOKEN|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
}
"""llama-server's own templates, which the tests select by a name, in Jinja."""
DEFAULT_ALIAS = "default"


@dataclass(frozen=True, slots=True)
class StackSettings:
    """The settings of one server with its worker. Those of Redis and the queue are missing."""

    worker: dict[str, Any]
    serve: dict[str, Any]
    queue: str
    hosts: tuple[str, ...]
    api_key: str | None


def read_flags(flags: Sequence[str], folder: Path, models: StandInModels) -> StackSettings:
    """Return the settings that the flags of llama-server mean. Flags without a meaning for llamaq are ignored.

    Args:
        flags: The flags.
        folder: The working folder of the test, to which file names are relative.
        models: The files of the models.
    """
    given, _ = _parser().parse_known_args(list(flags))
    queue = min((given.alias or DEFAULT_ALIAS).split(","))
    serve = {
        "http_port": given.port,
        "cors_origins": given.cors_origins or "*",
        "accept_any_model": True,
        "default_max_tokens": given.n_predict if given.n_predict and given.n_predict > 0 else None,
        "log_level": "debug" if given.verbose else "warning",
        "disabled_endpoints": _disabled_endpoints(given),
    }
    return StackSettings(
        _worker_settings(given, folder, models), serve, queue, tuple(given.host.split(",")), given.api_key
    )


def _disabled_endpoints(given: argparse.Namespace) -> tuple[str, ...]:
    has_slots = not given.no_slots or given.slot_save_path  # llama-server saves slots with `--no-slots` too
    flags = {"page": given.no_ui, "slots": not has_slots, "metrics": not given.metrics}
    return tuple(name for name, is_disabled in flags.items() if is_disabled)


def _worker_settings(given: argparse.Namespace, folder: Path, models: StandInModels) -> dict[str, Any]:
    n_parallel = given.parallel or 4
    n_ctx = given.ctx_size or 4096
    n_batch = max(min(given.batch_size or 2048, n_ctx), n_parallel)
    values: dict[str, Any] = {
        "n_parallel": n_parallel,
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "chunk_size": n_batch,
        "n_ubatch": given.ubatch_size,
        "n_threads": 1,
        "kv_unified": given.kv_unified,
        "temperature": given.temp,
        "seed": given.seed,
        "cache_ram_mb": given.cache_ram,
        "cache_dir": given.slot_save_path and folder / given.slot_save_path,
        "chat_template_file": _chat_template_file(given, folder),
        "cell_margin": 1,
        "embeddings": given.embedding or given.reranking or None,
        "model": str(_model_of(given, models)),
        "pooling": given.pooling,
        "log_level": "info",
    }
    return {name: value for name, value in values.items() if value is not None}


def _model_of(given: argparse.Namespace, models: StandInModels) -> Path:
    if given.reranking:
        return models.reranking
    return models.embedding if given.embedding else models.generation


def _chat_template_file(given: argparse.Namespace, folder: Path) -> Path | None:
    """Return the file of the chat template that the flags name. None: that of the model."""
    text = CHAT_TEMPLATES.get(given.chat_template or "", given.chat_template)
    if given.chat_template_file:
        text = (folder / str(given.chat_template_file)).read_text()
    if text is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
        # A worker has no setting for this: a request decides, or the template.
        file.write("{%- set enable_thinking = false -%}" * (given.reasoning == "off") + text)
    return Path(file.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("port", "ctx-size", "parallel", "n-predict", "batch-size", "ubatch-size", "seed", "cache-ram"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--temp", type=float)
    parser.add_argument("--host", default="127.0.0.1")
    texts = (
        "alias",
        "api-key",
        "slot-save-path",
        "chat-template",
        "chat-template-file",
        "pooling",
        "cors-origins",
        "reasoning",
    )
    for name in texts:
        parser.add_argument(f"--{name}")
    for name in ("kv-unified", "embedding", "reranking", "verbose", "no-ui", "no-slots", "metrics"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser
