"""A worker's settings: small groups, checked once, from flags, `LLAMAQ_*` variables or a TOML file, in that order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import TomlConfigSettingsSource as TomlSource

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.job_request import MAX_SALT_CHARS
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.settings import ENV_PREFIX, QueueSettings, explain_settings

MAX_SEQUENCES = 256
"""llama.cpp's LLAMA_MAX_SEQ."""


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _split_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class ModelSettings(BaseModel):
    """The model and its context."""

    model: str | None = Field(None, description="a GGUF file, or hf:OWNER/REPO/FILE.gguf; without it the demo model")
    n_gpu_layers: int = Field(99, ge=0, description="layers to offload to the GPU")
    n_ctx: int = Field(8192, ge=64, description="KV cells, shared by all slots")
    n_batch: int | None = Field(None, ge=1, description="most tokens in a tick; n_ctx, at most 2048, when not given")
    n_ubatch: int = Field(512, ge=1, description="most tokens that llama.cpp computes at once")
    n_threads: int = Field(
        default_factory=usable_cores, ge=1, description="threads of llama.cpp; the cores it may use when not given"
    )
    flash_attn: Literal["auto", "on", "off"] = Field(
        "auto", description="auto, on or off; on a CPU neither is faster everywhere"
    )
    device: int | None = Field(None, ge=0, description="GPU to use alone; all when not given")
    devices: Annotated[tuple[int, ...], NoDecode] = Field(
        (), description="0,1,…: one process for each of these GPUs, under a supervisor"
    )

    _split_devices = field_validator("devices", mode="before")(_split_commas)

    @property
    def batch_budget(self) -> int:
        """The most tokens that one `llama_decode` gets."""
        return self.n_batch or min(self.n_ctx, 2048)


class BatchSettings(BaseModel):
    """Slots and how ticks are planned."""

    n_parallel: int = Field(4, ge=1, le=MAX_SEQUENCES, description="slots: jobs that run at the same time")
    chunk_size: int = Field(512, ge=1, description="most tokens of a prompt that one tick prefills")
    batch_strategy: str = Field(
        "decode-maximal", description="decode-maximal, prefill-priority, balanced, or your own as module:Class"
    )
    max_queue: int = Field(0, ge=0, description="waiting jobs at which submit raises QueueFull; 0: no bound")
    inbox_window: int = Field(
        2, ge=0, le=MAX_SEQUENCES, description="jobs claimed and prepared beyond the free slots, so that none waits"
    )


class CacheSettings(BaseModel):
    """The prefix cache. Computed prefixes stay for later jobs: on the device, in host memory, on disk."""

    cache_prompt: bool = Field(True, description="keep and share prefixes; off: every prompt is computed in full")
    cache_sequences: int | None = Field(
        None, ge=0, le=MAX_SEQUENCES, description="kept sequences at most; what llama.cpp allows when not given"
    )
    held_cells: int | None = Field(
        None, ge=0, description="KV cells that kept sequences may hold while jobs run; 256 when not given (see docs)"
    )
    cache_ram_mb: int = Field(2048, ge=0, description="host memory for prefixes that left the device, in MiB")
    cache_dir: Path | None = Field(None, description="folder for prefixes that left host memory, and for saved slots")
    cache_disk_mb: int = Field(8192, ge=0, description="most that lies in --cache-dir, saved slots aside, in MiB")
    cache_salt: str = Field(
        "", max_length=MAX_SALT_CHARS, description="share prefixes only among workers and jobs of this salt"
    )
    slot_prompt_similarity: float = Field(
        0.1, ge=0, le=1, description="share of a prompt that a slot's last content must begin with to be its own"
    )
    kv_unified: bool = Field(True, description="one pool of cells for all sequences; off: n_ctx split among them")


class LifeSettings(BaseModel):
    """Leases, heartbeats and the end."""

    lease_s: float = Field(10.0, ge=1, description="how long a job stays with a silent worker")
    hang_s: float = Field(60.0, ge=1, description="a tick that takes longer, and than four of the slowest, is a hang")
    heartbeat_s: float = Field(1.0, gt=0, le=60, description="how often the worker shows what it does")
    drain_s: float = Field(30.0, ge=0, description="how long running jobs may go on after SIGTERM")
    max_crashes: int = Field(3, ge=1, description="workers that may die of a job before it is given up")
    checkpoint_tokens: int = Field(64, ge=1, description="stream=false: store what was generated every so many tokens")
    checkpoint_s: float = Field(5.0, gt=0, description="stream=false: and at least so often")
    disconnect_s: float = Field(5.0, gt=0, description="cancel_on_disconnect: how long a job may be without a reader")
    hooks: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="module:function, comma separated, called with each tick's and job's measurements"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")

    _split_hooks = field_validator("hooks", mode="before")(_split_commas)


class WorkerSettings(QueueSettings, ModelSettings, BatchSettings, CacheSettings, LifeSettings, SamplingDefaults):
    """Everything that `llamaq worker` can be told; sampling parameters are defaults that a job may override."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags first, then the environment, then the file."""
        return init_settings, sources["env_settings"], TomlSource(settings_cls)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.n_parallel > self.batch_budget:
            raise ValueError(
                f"--n-parallel (LLAMAQ_N_PARALLEL): {self.n_parallel} slots need a batch of as many tokens,"
                f" but --n-batch is {self.batch_budget}"
            )
        if self.batch_budget > self.n_ctx:
            raise ValueError(f"--n-batch (LLAMAQ_N_BATCH): {self.batch_budget} is more than --n-ctx {self.n_ctx}")
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("--devices (LLAMAQ_DEVICES): a device stands there twice")
        return self

    @property
    def sampling(self) -> SamplingDefaults:
        """The sampling defaults alone."""
        return SamplingDefaults(**{name: getattr(self, name) for name in SamplingDefaults.model_fields})


def load_settings(config: Path | None = None, **flags: Any) -> WorkerSettings:
    """Settings out of flags (None: not given), the environment and a TOML file; raises `InvalidSettings`."""
    if config is not None and not config.is_file():
        raise InvalidSettings(f"--config: there is no file {config}")

    class Configured(WorkerSettings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        loaded = Configured(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as exc:
        raise explain_settings(exc) from exc
    except ValueError as exc:
        raise InvalidSettings(f"--config: {config}: {exc}") from exc
    values = {name: getattr(loaded, name) for name in WorkerSettings.model_fields}
    return WorkerSettings.model_construct(loaded.model_fields_set, **values)
