"""A worker's settings of llama.cpp's threads. They have the names that llama.cpp's own programs use."""

from __future__ import annotations

import re
from typing import Self

from pydantic import BaseModel, Field, model_validator

from llamaq.worker.cpu_cores import usable_cores

MAX_THREADS = 512
"""GGML_MAX_N_THREADS. With far more threads than the system has, llama.cpp ends the process."""
DEFAULT_POLL = 50
_MASK, _RANGE = re.compile(r"(0x)?[0-9a-f]+", re.IGNORECASE), re.compile(r"(\d{1,3})-(\d{1,3})")


class ThreadSettings(BaseModel):
    """Threads."""

    n_threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Number of llama.cpp's threads. If not set: one for each physical CPU core that the process may "
        "use, within the CPU quota of its container, and fewer while other programs keep cores busy, because each step "
        "waits for the slowest thread; while several workers compute on this host without a GPU, each takes its share "
        "of the cores. A number that is set does not change.",
    )
    n_threads_batch: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Number of threads for batches of more than one token, even while other workers "
        "compute. If not set: as many as for one token.",
    )
    cpu_mask: str | None = Field(
        None,
        description="CPUs on which llama.cpp's threads run, as the bits of a hexadecimal number: `f0` are the CPUs 4 "
        "to 7. If neither `cpu_mask` nor `cpu_range` is set: all CPUs of the process.",
    )
    cpu_range: str | None = Field(
        None, description="CPUs on which llama.cpp's threads run, in addition to `cpu_mask`: `4-7` are the CPUs 4 to 7."
    )
    cpu_strict: bool = Field(False, description="Each of llama.cpp's threads runs on one of these CPUs alone.")
    prio: int = Field(
        0,
        ge=-1,
        le=3,
        description="Priority of llama.cpp's threads: -1 (low), 0 (as the process), 1 (medium), 2 (high) or 3 (real "
        "time). From 1 on, the system must allow the process real-time priorities.",
    )
    poll: int = Field(
        DEFAULT_POLL,
        ge=0,
        le=100,
        description="How long llama.cpp's threads wait actively for the next step, before they sleep: 0 (not at all) "
        "to 100. Only for a llama.cpp built without OpenMP. With OpenMP, the variable `OMP_WAIT_POLICY` decides.",
    )

    @model_validator(mode="after")
    def _check_cpus(self) -> Self:
        _ = self.cpus
        if self.cpu_strict and not self.cpus:
            raise ValueError("--cpu-strict (LLAMAQ_CPU_STRICT): --cpu-mask or --cpu-range is required")
        return self

    @property
    def cpus(self) -> frozenset[int]:
        """The CPUs on which llama.cpp's threads run. Empty: all CPUs of the process."""
        return frozenset(_cpus_of_mask(self.cpu_mask)) | frozenset(_cpus_of_range(self.cpu_range))

    @property
    def n_threads_alone(self) -> int:
        """Number of llama.cpp's threads while no other worker of this host computes."""
        return self.n_threads or usable_cores(self.cpus)


def _cpus_of_mask(mask: str | None) -> list[int]:
    if mask is None:
        return []
    if not _MASK.fullmatch(mask) or not 0 < (bits := int(mask, 16)) < 1 << MAX_THREADS:
        raise ValueError(f"--cpu-mask (LLAMAQ_CPU_MASK): a hexadecimal number is required, such as f0, got {mask!r}")
    return [cpu for cpu in range(MAX_THREADS) if bits >> cpu & 1]


def _cpus_of_range(cpus: str | None) -> range:
    if cpus is None:
        return range(0)
    match = _RANGE.fullmatch(cpus)
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if not first <= last < MAX_THREADS:
        raise ValueError(f"--cpu-range (LLAMAQ_CPU_RANGE): FIRST-LAST is required, such as 4-7, got {cpus!r}")
    return range(first, last + 1)
