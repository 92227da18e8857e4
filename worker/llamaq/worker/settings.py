"""A worker's settings: small groups. Each group checks its own settings, and `WorkerSettings` checks them together.

The value of a setting comes from the first of these sources that has it: the flag, the environment variable (`LLAMAQ_`
and the name in capitals), the TOML file, the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import TomlConfigSettingsSource as TomlSource

from llamaq.common.errors import InvalidSettings
from llamaq.common.logging_setup import LogFormat
from llamaq.common.protocol.job_request import JobDefaults
from llamaq.common.protocol.output_params import MAX_SALT_CHARS
from llamaq.common.settings import ENV_PREFIX, LogFormatSetting, LogLevelSetting, QueueSettings, explain_settings
from llamaq.worker.model_settings import UNQUANTIZED_TYPES, DeviceSettings, ModelSettings, RopeSettings, split_commas
from llamaq.worker.speculation_settings import SpeculationSettings
from llamaq.worker.thread_settings import ThreadSettings

# llama.cpp's LLAMA_MAX_SEQ.
MAX_SEQUENCES = 256


class BatchSettings(BaseModel):
    """Slots, batches and waiting jobs."""

    n_parallel: int = Field(
        4, ge=1, le=MAX_SEQUENCES, description="Number of slots: at most this number of jobs run at the same time."
    )
    chunk_size: int = Field(512, ge=1, description="Maximum number of tokens of one prompt that a tick computes.")
    batch_strategy: str = Field(
        "decode-maximal",
        description="Strategy that builds each batch: `decode-maximal`, `prefill-priority`, `balanced`, "
        "`latency-target`, or a class of your own as `module:Class`.",
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0,
        description="With the batch strategy `latency-target`: upper bound on the time between two tokens of a "
        "stream, in milliseconds. While prompts are computed, the strategy tries to keep 95 % of these times "
        "below it. If not set: 50.",
    )
    stream_interval_ms: float = Field(
        8.0,
        ge=0,
        le=1000,
        description="Tokens of short ticks are published together, at most this number of milliseconds after the last "
        "ones. First tokens and ends are published at once. 0: the tokens of each tick are published at once.",
    )
    cell_margin: int = Field(
        64,
        ge=1,
        description="Number of free KV cells that a job needs in addition to its prompt to get a slot. The job takes "
        "further cells as it generates. When no cells are left, cached sequences are evicted. If that is not enough, "
        "the job that began last loses its slot. A larger margin means fewer preemptions, and fewer jobs at the same "
        "time.",
    )
    bulk_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the slot time that bulk jobs get while interactive jobs could use all slots. 0: bulk "
        "jobs run only in slots that no interactive job needs.",
    )
    max_queue: int = Field(
        0,
        ge=0,
        description="Number of waiting jobs in a partition at which submit raises `QueueFull`. 0 sets no bound.",
    )
    inbox_window: int = Field(
        2,
        ge=0,
        le=MAX_SEQUENCES,
        description="Number of jobs that the worker claims and prepares in addition to its free slots, so that a slot "
        "does not wait for Redis.",
    )

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target_itl_ms is not None and self.batch_strategy != "latency-target":
            raise ValueError(
                "--target-itl-ms (LLAMAQ_TARGET_ITL_MS): only --batch-strategy latency-target has a target, but "
                f"--batch-strategy is {self.batch_strategy}"
            )
        return self


class CacheSettings(BaseModel):
    """The prefix cache. It stores computed prefixes on the device, in host memory and on disk."""

    cache_prompt: bool = Field(
        True, description="Store computed prefixes and reuse them. Off: the worker computes every prompt in full."
    )
    cache_sequences: int | None = Field(
        None,
        ge=0,
        le=MAX_SEQUENCES,
        description="Maximum number of cached sequences on the device. If not set: three for each slot if the "
        "model is recurrent, otherwise 32 if it has a sliding window, otherwise 64. If `kv_unified` is off, it is 0 "
        "unless the model is recurrent.",
    )
    held_cells: int | None = Field(
        None,
        ge=0,
        description="Maximum number of KV cells that cached sequences hold while jobs run. Attention scans every used "
        "cell, so idle cells slow each tick. If not set: a quarter of `n_ctx`. On a CPU: 0, so that they are loaded "
        "from host memory when a job needs them, or 256 if sequences can only be saved whole; but a quarter of `n_ctx` "
        "if `cache_ram_mb` is 0.",
    )
    cache_ram_mb: int = Field(
        2048, ge=0, description="Host memory for prefixes that were evicted from the device, in MiB. 0 turns it off."
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder for prefixes that were evicted from host memory, and for saved slots. If not set: the "
        "worker writes neither.",
    )
    cache_disk_mb: int = Field(
        8192,
        ge=0,
        description="Maximum size of the prefixes of a worker in `cache_dir`, in MiB. Prefixes of other models and "
        "settings, which no worker uses, take at most the same size, unless they were used within a day. Saved slots "
        "do not count.",
    )
    cache_salt: str = Field(
        "", max_length=MAX_SALT_CHARS, description="Workers share files in `cache_dir` only if they have the same salt."
    )
    slot_prompt_similarity: float = Field(
        0.1,
        ge=0,
        le=1,
        description="A job prefers the slot whose last content begins with at least this share of the prompt. 0 turns "
        "the preference off.",
    )


class LifeSettings(BaseModel):
    """Leases, heartbeats and shutdown."""

    lease_s: float = Field(
        10.0,
        ge=1,
        le=10**7,  # a lease must be shorter than `EXPIRED_IDLE_MS` in `_lib.lua`
        description="Seconds after which a job's lease expires if it is not renewed. Then another worker may claim the "
        "job.",
    )
    hang_s: float = Field(
        60.0,
        ge=1,
        description="A tick hangs if it takes longer than this number of seconds, and longer than four times the "
        "slowest tick so far.",
    )
    heartbeat_s: float = Field(
        1.0, ge=0.01, le=60, description="Seconds between two heartbeats, at most a quarter of `lease_s`."
    )
    max_crashes: int = Field(
        3,
        ge=1,
        description="A job becomes a dead letter when this number of workers in a row crashed while they ran it. 1 "
        "acts as 2.",
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that running jobs may continue after SIGTERM. Then the worker requeues the jobs that "
        "still run.",
    )
    exit_when_empty: bool = Field(
        False,
        description="End with exit code 0 when the queue has been empty for `empty_s` seconds: no job waits or runs, "
        "on any worker.",
    )
    empty_s: float = Field(
        10.0,
        ge=0,
        description="With `exit_when_empty`: seconds for which the queue must be empty. A delayed job that is due "
        "within this time counts as waiting.",
    )

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats. `CrashCheck` compares the age of the last one with parts of a lease."""
        return min(self.heartbeat_s, self.lease_s / 4)


class AttemptSettings(BaseModel):
    """Stored output, retries and disconnected clients."""

    checkpoint_tokens: int = Field(
        64, ge=1, description="Jobs with `stream=False`: number of new tokens after which the output is stored."
    )
    checkpoint_s: float = Field(
        5.0, gt=0, description="Jobs with `stream=False`: seconds after which new output is stored in any case."
    )
    retry_s: float = Field(
        1.0,
        ge=0,
        le=86400,
        description="Jobs with `retries`: seconds from a failure to the first retry. Each further retry waits twice as "
        "long. Each wait is shortened by a random part of up to one half, so that jobs are not retried all at once.",
    )
    max_retry_s: float = Field(60.0, ge=0, le=86400, description="Longest time in seconds from a failure to a retry.")
    other_model: Literal["leave", "restart"] = Field(
        "leave",
        description="What the worker does with a job if another model generated its first tokens. `leave`: the job "
        "waits for a worker with that model. `restart`: a job with `stream=False` starts again. Other jobs fail with "
        "the code `other_model`, because published tokens never change.",
    )
    disconnect_s: float = Field(
        5.0,
        gt=0,
        description="Jobs with `cancel_on_disconnect`: seconds without a subscriber after which the job is cancelled, "
        "while it waits or runs.",
    )


class MonitoringSettings(BaseModel):
    """Hooks, logs and metrics."""

    hooks: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Functions as `module:function`, separated by commas. They get the measurements of each tick and "
        "each job.",
    )
    log_level: LogLevelSetting = "info"
    log_format: LogFormatSetting = LogFormat.TEXT
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port at which the worker serves its own metrics for Prometheus. 0: any free port. If not set: "
        "none. With several `devices`, each worker takes the next port.",
    )
    metrics_bind: str = Field(
        "127.0.0.1", description="Address of `metrics_port`. `0.0.0.0` listens on all IPv4 addresses."
    )

    _split_hooks = field_validator("hooks", mode="before")(split_commas)


class WorkerSettings(
    QueueSettings,
    ModelSettings,
    ThreadSettings,
    DeviceSettings,
    RopeSettings,
    BatchSettings,
    SpeculationSettings,
    CacheSettings,
    LifeSettings,
    AttemptSettings,
    MonitoringSettings,
    JobDefaults,
):
    """All settings of `llamaq worker`. Sampling parameters, seed and grammar are defaults, which a job may replace."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings in the order of precedence: flags, the environment, the file."""
        return init_settings, sources["env_settings"], TomlSource(settings_cls)

    @model_validator(mode="after")
    def _check_groups_together(self) -> Self:
        if self.n_parallel > self.batch_budget:
            raise ValueError(
                f"--n-parallel (LLAMAQ_N_PARALLEL): {self.n_parallel} slots need a batch of at least as many tokens,"
                f" but --n-batch is {self.batch_budget}"
            )
        if self.speculation != "off" and self.backend_sampling:
            raise ValueError(
                "--backend-sampling (LLAMAQ_BACKEND_SAMPLING): not possible with --speculation, because this version "
                "of llama.cpp returns wrong logits for several tokens of a sequence"
            )
        if self.speculation != "off" and self.embeddings:
            raise ValueError("--speculation (LLAMAQ_SPECULATION): a worker with --embeddings generates no tokens")
        for name in ("cache_type_v", "cache_type_v_draft"):
            cache_type = getattr(self, name)
            if self.flash_attn == "off" and cache_type not in UNQUANTIZED_TYPES:
                raise ValueError(
                    f"--{name.replace('_', '-')} (LLAMAQ_{name.upper()}): {cache_type} needs flash attention, but "
                    "--flash-attn is off"
                )
        return self

    @property
    def capacity(self) -> int:
        """Upper bound on the jobs that the worker has claimed at a time."""
        return self.n_parallel + self.inbox_window

    @property
    def job_defaults(self) -> JobDefaults:
        """The settings that are defaults of jobs, without the other settings."""
        return JobDefaults(**{name: getattr(self, name) for name in JobDefaults.model_fields})


def load_settings(config: Path | None = None, **flags: Any) -> WorkerSettings:
    """Return the settings from flags, the environment and a TOML file.

    Args:
        config: The TOML file. None: no file.
        flags: Fields of `WorkerSettings`. None stands for "not given".

    Raises:
        InvalidSettings: A setting is unknown or not valid, or the file cannot be read.
    """
    if config is not None:
        _check_is_file(config)

    class Configured(WorkerSettings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        loaded = Configured(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as exc:
        raise explain_settings(exc) from exc
    except (OSError, ValueError) as exc:
        raise InvalidSettings(f"--config: {config}: {exc}") from exc
    values = {name: getattr(loaded, name) for name in WorkerSettings.model_fields}
    return WorkerSettings.model_construct(loaded.model_fields_set, **values)


def _check_is_file(config: Path) -> None:
    """Raise `InvalidSettings` if the path has no file, or is in a folder that the user may not enter."""
    try:
        if config.is_file():
            return
    except OSError as exc:
        raise InvalidSettings(f"--config: {config} cannot be read: {exc.strerror}") from exc
    raise InvalidSettings(f"--config: there is no file {config}")
