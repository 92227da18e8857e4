"""The fingerprint of a model. A job that one model has begun is not continued by another model."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

from llamaq.worker.engine.load_options import ModelOptions, RopeOptions
from llamaq.worker.engine.model_files import files_of_model

N_SAMPLES = 256
SAMPLE_BYTES = 16 * 1024
DEFAULT_ROPE = RopeOptions()


def fingerprint_model(
    path: Path, options: ModelOptions, rope: RopeOptions = DEFAULT_ROPE, chat_template: str | None = None
) -> str:
    """Return a hash of what determines a model's logits after the messages of a chat, as 32 hexadecimal digits.

    It contains the sizes of the model's files, samples of their contents, and the settings that change the model or its
    prompts. An option with its default value adds nothing. So a version of llamaq with a further option gives the same
    hash, and workers of both versions continue each other's jobs.

    Settings are not part of the hash if they only round otherwise (types of the cache, flash attention), distribute the
    work (threads, batches, devices), or are defaults for parameters of jobs. Workers of one queue may differ in them.

    Hashing a whole large model would take most of a minute at each start. The samples contain the beginning of each
    file, with the metadata, and parts of the weights at equal distances. So the hash differs for other weights and for
    another quantization.

    Args:
        path: The model's file. If the model is split into several files, the first of them.
        options: The options of the model. What changes its computation or its metadata is part of the hash: adapters,
            control vectors and overrides.
        rope: How positions are scaled.
        chat_template: The chat template that replaces the one of the model. None: none does.
    """
    digest = hashlib.blake2b(digest_size=16)
    for adapter in options.lora:
        digest.update(f"lora {adapter.scale!r}".encode())
    for vector in options.control_vectors:
        digest.update(f"control_vector {vector.scale!r} {options.control_vector_layers}".encode())
    for override in options.override_kv:
        digest.update(f"override_kv {override}".encode())
    for option in fields(rope):
        if (value := getattr(rope, option.name)) != option.default:
            digest.update(f"rope {option.name} {value!r}".encode())
    if chat_template is not None:
        digest.update(f"chat_template {len(chat_template)} {chat_template}".encode())
    for each in (*files_of_model(path), *(each.path for each in (*options.lora, *options.control_vectors))):
        size = each.stat().st_size
        digest.update(str(size).encode())
        with each.open("rb") as file:
            for number in range(N_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (N_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
