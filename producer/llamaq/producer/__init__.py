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
    ProtocolError,
    QueueFull,
    RedisFull,
    ResultTimeout,
    SlotCommandRefused,
)
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats, Result
from llamaq.common.protocol.job_request import JobOptions, Message, Priority
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails, JobStatus
from llamaq.common.protocol.queue_state import QueueDepth, QueueStats, Worker
from llamaq.common.protocol.slot_commands import SlotFile, WorkerSlots
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
    "Priority",
    "ProtocolError",
    "QueueDepth",
    "QueueFull",
    "QueueStats",
    "RedisFull",
    "Result",
    "ResultTimeout",
    "SlotCommandRefused",
    "SlotFile",
    "Tokenizer",
    "Worker",
    "WorkerSlots",
]
