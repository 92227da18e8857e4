"""What a web backend uses: `Client` and `AsyncClient`, what they give back, and what they raise."""

from __future__ import annotations

from llamaq.common.errors import (
    DeadLetterNotFound,
    InvalidRequest,
    InvalidSettings,
    JobFailed,
    JobNotFound,
    LlamaqError,
    MissingExtra,
    NoWorker,
    OrderRefused,
    ProtocolError,
    QueueFull,
    RedisFull,
    ResultTimeout,
)
from llamaq.common.messages import (
    DeadLetter,
    DeadLetterDetails,
    FinishReason,
    JobOptions,
    JobState,
    JobStats,
    JobStatus,
    Message,
    Priority,
    QueueDepth,
    QueueStats,
    Result,
    Worker,
)
from llamaq.common.orders import SlotFile, WorkerSlots
from llamaq.producer.client import AsyncClient
from llamaq.producer.job import AsyncJob, Chunk
from llamaq.producer.sync import Client, Job
from llamaq.producer.tokenizer import Tokenizer

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Chunk",
    "Client",
    "DeadLetter",
    "DeadLetterDetails",
    "DeadLetterNotFound",
    "FinishReason",
    "InvalidRequest",
    "InvalidSettings",
    "Job",
    "JobFailed",
    "JobNotFound",
    "JobOptions",
    "JobState",
    "JobStats",
    "JobStatus",
    "LlamaqError",
    "Message",
    "MissingExtra",
    "NoWorker",
    "OrderRefused",
    "Priority",
    "ProtocolError",
    "QueueDepth",
    "QueueFull",
    "QueueStats",
    "RedisFull",
    "Result",
    "ResultTimeout",
    "SlotFile",
    "Tokenizer",
    "Worker",
    "WorkerSlots",
]
