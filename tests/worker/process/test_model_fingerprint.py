from __future__ import annotations

from pathlib import Path

from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.process.model_fingerprint import fingerprint_model


def test_models_with_other_weights_have_other_fingerprints(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"{seed}-{copy}.gguf", PLAIN, seed=seed) for seed in (1, 2) for copy in (0, 1)]
    first, same, other, _ = map(fingerprint_model, paths)
    assert first == same
    assert first != other
