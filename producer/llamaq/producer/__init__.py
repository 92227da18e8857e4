"""The public API for web backends: the clients `Client` and `AsyncClient`, the types they return, their errors."""

from __future__ import annotations

from llamaq.common.errors import (
    DeadLetterNotFound,
    ErrorCode,
    IdempotencyConflict,
    InvalidRequest,
    InvalidSettings,
    JobFailed,
    JobNotFound,
    LlamaqError,
    MissingExtra,
    NoWorker,
    ProtocolError,
    QueueFull,
    RedisFull,
    ResultTimeout,
    SlotCommandRefused,
)
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats, Result
from llamaq.common.protocol.job_request import JobOptions, JobParams, Message, Priority
from llamaq.common.protocol.job_snapshots import DeadLetter, DeadLetterDetails, JobStatus, JobSummary
from llamaq.common.protocol.slot_commands import SlotFile, WorkerSlots
from llamaq.common.protocol.snapshots import (
    CacheSnapshot,
    QueueDepth,
    QueueStats,
    QueueSummary,
    SlotSnapshot,
    TickStats,
    Worker,
    WorkerCard,
)
from llamaq.common.settings import ClientSettings
from llamaq.producer.async_stream import AsyncStream
from llamaq.producer.client import AsyncClient, Messages
from llamaq.producer.job import AsyncJob, Chunk
from llamaq.producer.sync import Client, Job, Stream
from llamaq.producer.tokenizer import Tokenizer

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncStream",
    "CacheSnapshot",
    "Chunk",
    "Client",
    "ClientSettings",
    "DeadLetter",
    "DeadLetterDetails",
    "DeadLetterNotFound",
    "ErrorCode",
    "FinishReason",
    "IdempotencyConflict",
    "InvalidRequest",
    "InvalidSettings",
    "Job",
    "JobFailed",
    "JobNotFound",
    "JobOptions",
    "JobParams",
    "JobState",
    "JobStats",
    "JobStatus",
    "JobSummary",
    "LlamaqError",
    "Message",
    "Messages",
    "MissingExtra",
    "NoWorker",
    "Priority",
    "ProtocolError",
    "QueueDepth",
    "QueueFull",
    "QueueStats",
    "QueueSummary",
    "RedisFull",
    "Result",
    "ResultTimeout",
    "SlotCommandRefused",
    "SlotFile",
    "SlotSnapshot",
    "Stream",
    "TickStats",
    "Tokenizer",
    "Worker",
    "WorkerCard",
    "WorkerSlots",
]
