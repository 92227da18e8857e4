"""The models whose fields users see: parameters, results, snapshots, events and settings."""

from __future__ import annotations

from pydantic import BaseModel

from llamaq.common.protocol.chat import FunctionCall, Message, TemplateParams, ToolCall
from llamaq.common.protocol.embedding_task import EmbeddingTask
from llamaq.common.protocol.job_events import Failed, Finished, PromptProgress, Retried, Started, Tokens
from llamaq.common.protocol.job_outcome import JobStats, Result
from llamaq.common.protocol.job_request import JobDefaults, JobParams, JobRequest
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails, JobStatus, JobSummary
from llamaq.common.protocol.output_params import OutputParams
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
from llamaq.common.protocol.sampling import SamplingDefaults, SamplingParams
from llamaq.common.protocol.slot_commands import SlotCommand, SlotFile, SlotReply, WorkerSlots
from llamaq.common.protocol.text_commands import Infill, Snippet, TextCommand, TextReply
from llamaq.common.settings import ClientSettings, QueueSettings
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.settings import ServeSettings
from llamaq.producer.bulk import BulkRun
from llamaq.producer.job_window.request_map import MappedResult
from llamaq.producer.rq.settings import RqSettings
from llamaq.worker.model_settings import DeviceSettings, ModelSettings, RopeSettings
from llamaq.worker.settings import (
    AttemptSettings,
    BatchSettings,
    CacheSettings,
    LifeSettings,
    MonitoringSettings,
    WorkerSettings,
)
from llamaq.worker.speculation_settings import SpeculationSettings
from llamaq.worker.thread_settings import ThreadSettings

_CHAT = (Message, ToolCall, FunctionCall, TemplateParams)
_PARAMS = (*_CHAT, SamplingParams, OutputParams)
_JOB = (*_PARAMS, JobParams, JobRequest, JobStats, Result, MappedResult, JobStatus, EmbeddingTask)
_EVENTS = (Started, Tokens, Finished, Failed, Retried, PromptProgress)
_SNAPSHOTS = (
    QueueDepth,
    QueueStats,
    QueueSummary,
    RecentJob,
    JobSummary,
    Worker,
    WorkerCard,
    LoraScale,
    SlotSnapshot,
    CacheSnapshot,
    TenantDepth,
    TickStats,
    TickTotals,
)
_DEAD_LETTERS = (DeadLetter, DeadLetterDetails)
_COMMANDS = (SlotCommand, SlotReply, SlotFile, WorkerSlots, TextCommand, Infill, Snippet, TextReply)
_CLIENT = (KeyRecord, ServeSettings, QueueSettings, ClientSettings, RqSettings, BulkRun)
_MODEL = (ModelSettings, ThreadSettings, DeviceSettings, RopeSettings)
_WORKER = (
    *(*_MODEL, BatchSettings, SpeculationSettings, CacheSettings),
    *(LifeSettings, AttemptSettings, MonitoringSettings),
    *(SamplingDefaults, JobDefaults, WorkerSettings),
)

MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model for model in (*_JOB, *_EVENTS, *_SNAPSHOTS, *_DEAD_LETTERS, *_COMMANDS, *_CLIENT, *_WORKER)
}
