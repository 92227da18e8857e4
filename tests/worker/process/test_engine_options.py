from __future__ import annotations

import pytest

from llamaq.worker.process import engine_options
from llamaq.worker.process.engine_options import choose_scan_threads
from llamaq.worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("has_gpu", "n_gpu_layers", "n_cores", "n_threads"),
    [(False, -1, 64, 1), (True, 0, 64, 1), (True, -1, 2, 1), (True, -1, 8, 2), (True, 20, 16, 4), (True, -1, 64, 4)],
)
def test_several_threads_read_logits_if_a_gpu_leaves_the_cores_free(
    monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, n_gpu_layers: int, n_cores: int, n_threads: int
) -> None:
    monkeypatch.setattr(engine_options, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(engine_options, "usable_cores", lambda: n_cores)
    assert choose_scan_threads(WorkerSettings(n_gpu_layers=n_gpu_layers)) == n_threads
