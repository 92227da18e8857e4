"""The public API for web backends: the clients `Client` and `AsyncClient`, the types they return, their errors."""

from __future__ import annotations

from llamaq.common.errors import (
    BatchIncomplete,
    DeadLetterNotFound,
    ErrorCode,
    IdempotencyConflict,
    InvalidRequest,
    InvalidSettings,
    JobFailed,
    JobNotFound,
    LlamaqError,
    MissingExtra,
    NotDurable,
    NoWorker,
    OtherKindOfQueue,
    ProtocolError,
    QueueDraining,
    QueueFull,
    RedisFull,
    RequestFailed,
    ResultTimeout,
    SlotCommandRefused,
    WorkerEnded,
)
from llamaq.common.protocol.chat import Message, ToolCall
from llamaq.common.protocol.embedding_task import Embedding, JobKind, Normalization, Pooling
from llamaq.common.protocol.job_events import PromptProgress
from llamaq.common.protocol.job_options import JobOptions
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats, Result
from llamaq.common.protocol.job_request import JobParams, Priority
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails, JobStatus, JobSummary
from llamaq.common.protocol.queue_and_worker_state import (
    CacheSnapshot,
    LoraScale,
    QueueDepth,
    QueueStats,
    QueueSummary,
    RecentJob,
    SlotSnapshot,
    TenantDepth,
    TickStats,
    TickTotals,
    Worker,
    WorkerCard,
)
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.common.protocol.slot_commands import SlotFile, WorkerSlots
from llamaq.common.protocol.text_commands import Snippet
from llamaq.common.settings import ClientSettings
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Reasoning
from llamaq.producer.auto_cancelled_stream import AsyncStream
from llamaq.producer.calls.calls_base import Messages
from llamaq.producer.chat_answers import Answer, ChatAnswers
from llamaq.producer.client import AsyncClient, JobArguments
from llamaq.producer.embed_and_rerank import EmbeddingOptions, RankedDocument
from llamaq.producer.job_handle import AsyncJob, Chunk
from llamaq.producer.job_window.request_map import MappedResult
from llamaq.producer.sync import Client, Job, Stream
from llamaq.producer.tokenizer import Tokenizer

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncJob",
    "AsyncStream",
    "BatchIncomplete",
    "CacheSnapshot",
    "CallArguments",
    "CallStarted",
    "ChatAnswers",
    "Chunk",
    "Client",
    "ClientSettings",
    "Content",
    "DeadLetter",
    "DeadLetterDetails",
    "DeadLetterNotFound",
    "Embedding",
    "EmbeddingOptions",
    "ErrorCode",
    "FinishReason",
    "IdempotencyConflict",
    "InvalidRequest",
    "InvalidSettings",
    "Job",
    "JobArguments",
    "JobFailed",
    "JobKind",
    "JobNotFound",
    "JobOptions",
    "JobParams",
    "JobState",
    "JobStats",
    "JobStatus",
    "JobSummary",
    "LlamaqError",
    "LoraScale",
    "MappedResult",
    "Message",
    "Messages",
    "MissingExtra",
    "NoWorker",
    "Normalization",
    "NotDurable",
    "OtherKindOfQueue",
    "Pooling",
    "Priority",
    "PromptProgress",
    "ProtocolError",
    "QueueDepth",
    "QueueDraining",
    "QueueFull",
    "QueueMode",
    "QueueStats",
    "QueueSummary",
    "RankedDocument",
    "Reasoning",
    "RecentJob",
    "RedisFull",
    "RequestFailed",
    "Result",
    "ResultTimeout",
    "SlotCommandRefused",
    "SlotFile",
    "SlotSnapshot",
    "Snippet",
    "Stream",
    "TenantDepth",
    "TickStats",
    "TickTotals",
    "Tokenizer",
    "ToolCall",
    "Worker",
    "WorkerCard",
    "WorkerEnded",
    "WorkerSlots",
]
