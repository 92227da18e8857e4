"""Errors, settings, and the messages, keys and scripts in Redis: the code that producers and workers share.

Users import errors, settings and messages from here; the import loads neither redis-py nor llama.cpp. No module
of this package imports `llamaq.producer` or `llamaq.worker`.
"""

from __future__ import annotations

from llamaq.common.errors import (
    DeadLetterNotFound,
    EmbeddedRedisError,
    EngineError,
    ErrorCode,
    InvalidRequest,
    InvalidSettings,
    JobFailed,
    JobNotFound,
    JobRejected,
    LlamaqError,
    MissingExtra,
    ModelError,
    NoWorker,
    ProtocolError,
    QueueFull,
    RedisFull,
    ResultTimeout,
    SlotCommandRefused,
    WorkerEnded,
)
from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.job_events import Event, Failed, Finished, PromptProgress, Retried, Started, Tokens
from llamaq.common.protocol.job_options import JobOptions
from llamaq.common.protocol.job_outcome import CacheTier, FinishReason, JobState, JobStats, Result
from llamaq.common.protocol.job_request import JobParams, JobRequest, Priority
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails, JobStatus
from llamaq.common.protocol.queue_and_worker_state import (
    CacheSnapshot,
    QueueDepth,
    QueueStats,
    SlotSnapshot,
    TenantDepth,
    TickStats,
    TickTotals,
    Worker,
    WorkerCard,
)
from llamaq.common.protocol.sampling import SamplingDefaults, SamplingParams
from llamaq.common.protocol.slot_commands import SlotFile, WorkerSlots
from llamaq.common.settings import ClientSettings, QueueSettings

__all__ = [
    "CacheSnapshot",
    "CacheTier",
    "ClientSettings",
    "DeadLetter",
    "DeadLetterDetails",
    "DeadLetterNotFound",
    "EmbeddedRedisError",
    "EngineError",
    "ErrorCode",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "InvalidRequest",
    "InvalidSettings",
    "JobFailed",
    "JobNotFound",
    "JobOptions",
    "JobParams",
    "JobRejected",
    "JobRequest",
    "JobState",
    "JobStats",
    "JobStatus",
    "LlamaqError",
    "Message",
    "MissingExtra",
    "ModelError",
    "NoWorker",
    "Priority",
    "PromptProgress",
    "ProtocolError",
    "QueueDepth",
    "QueueFull",
    "QueueSettings",
    "QueueStats",
    "RedisFull",
    "Result",
    "ResultTimeout",
    "Retried",
    "SamplingDefaults",
    "SamplingParams",
    "SlotCommandRefused",
    "SlotFile",
    "SlotSnapshot",
    "Started",
    "TenantDepth",
    "TickStats",
    "TickTotals",
    "Tokens",
    "Worker",
    "WorkerCard",
    "WorkerEnded",
    "WorkerSlots",
]
