"""The fingerprint of a model file. A job that one model has begun is not continued by another model."""

from __future__ import annotations

import hashlib
from pathlib import Path

N_SAMPLES = 256
SAMPLE_BYTES = 16 * 1024


def fingerprint_model(path: Path) -> str:
    """Return a hash of the file's size and of samples of its content, as 32 hexadecimal digits.

    Hashing a whole large model would take most of a minute at each start. The samples contain the beginning of the file
    with the metadata, and parts of the weights at equal distances. So the hash differs for other weights and for
    another quantization. If a model is split into several files, only the first file is read.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for number in range(N_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (N_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
