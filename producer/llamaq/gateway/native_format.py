"""The form of llama-server's own endpoints: requests and answers of `/completion`, slots, properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.common.protocol.snapshots import SlotSnapshot, Worker
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import GenerationBody, read_body
from llamaq.producer.openai_format.response_body import timings_object

STOP_TYPES = {
    FinishReason.STOP: "eos",
    FinishReason.LENGTH: "limit",
    FinishReason.DEADLINE: "limit",
    FinishReason.CANCELLED: "none",
}


def read_native_body(body: Mapping[str, Any]) -> GenerationBody:
    """Return what the body of `/completion` asks for. Its fields are those of a completion, with one name more.

    Raises:
        InvalidRequest: The body has no prompt, or a field that is not supported.
    """
    if "prompt" not in body:
        raise InvalidRequest("prompt: a text, a list of token ids, or a list of these is required")
    renamed = {**body, "n": body.get("n_cmpl", body.get("n"))}
    return read_body(Endpoint.COMPLETIONS, renamed)


def final_object(
    result: Result, index: int, *, values: Mapping[str, Any], model: str, is_streamed: bool, has_tokens: bool
) -> dict[str, Any]:
    """Return the answer to `/completion`, or the last event of a streamed one.

    Args:
        result: The result of the job.
        index: The number of the choice.
        values: The arguments of the job.
        model: The name of the model that the answer shows.
        is_streamed: Whether the text was sent before.
        has_tokens: Whether the answer has the token ids.
    """
    stats = result.stats
    return {
        "index": index,
        "content": "" if is_streamed else result.text,
        "tokens": list(result.tokens) if has_tokens and not is_streamed else [],
        "id_slot": stats.slot if stats.slot is not None else -1,
        "stop": True,
        "model": model,
        "tokens_predicted": stats.generated_tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "generation_settings": generation_settings(values, stats),
        "prompt": values.get("prompt", ""),
        "has_new_line": "\n" in result.text,
        "truncated": False,
        "stop_type": stop_type(result),
        "stopping_word": stats.stop_string or "",
        "tokens_cached": stats.prompt_tokens + stats.generated_tokens - 1,
        "timings": timings_object(stats),
    }


def stop_type(result: Result) -> str:
    """Return why a job ended, as llama-server names it."""
    return "word" if result.stats.stop_string is not None else STOP_TYPES[result.finish_reason]


def partial_object(index: int, text: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return an event of a streamed completion with the next text."""
    return {
        "index": index,
        "content": text,
        "tokens": list(tokens),
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 0,
        "tokens_evaluated": 0,
    }


def generation_settings(values: Mapping[str, Any], stats: JobStats) -> dict[str, Any]:
    """Return the options that a job was given, and its seed."""
    hidden = {"prompt", "tokens", "messages", "metadata", "cancel_on_disconnect", "idempotency_key"}
    given = {name: value for name, value in values.items() if name not in hidden}
    limit = given.get("max_tokens", given.get("n_predict", -1))
    return {**given, "seed": stats.seed, "n_predict": limit, "max_tokens": limit}


def slot_object(worker: Worker, slot: SlotSnapshot, slot_id: int) -> dict[str, Any]:
    """Return an entry of `/slots`.

    Args:
        worker: The worker that has the slot.
        slot: The slot.
        slot_id: Its number among the slots of all workers of the queue.
    """
    return {
        "id": slot_id,
        "n_ctx": min(worker.card.n_ctx, worker.card.n_ctx_train or worker.card.n_ctx),
        "speculative": False,
        "is_processing": slot.job_id is not None,
        "id_task": slot.job_id,
        "state": slot.state,
        "n_prompt_tokens": slot.prompt_tokens,
        "n_prompt_tokens_processed": max(slot.prefilled_tokens - slot.cached_tokens, 0),
        "n_prompt_tokens_cache": slot.cached_tokens,
        "next_token": [{"has_next_token": slot.job_id is not None, "n_remain": -1, "n_decoded": slot.generated_tokens}],
        "worker": worker.card.worker,
        "slot": slot.index,
    }


def props_object(queue: str, workers: Sequence[Worker]) -> dict[str, Any]:
    """Return `/props` of a queue with live workers."""
    card = workers[0].card
    return {
        "default_generation_settings": {
            "params": {},
            "n_ctx": min(card.n_ctx, card.n_ctx_train or card.n_ctx),
        },
        "total_slots": sum(worker.card.n_parallel for worker in workers),
        "model_alias": queue,
        "model_path": card.model,
        "modalities": {"vision": False, "audio": False},
        "chat_template": card.chat_template or "",
        "chat_template_caps": {},
        "build_info": f"llamaq-{card.version}",
        "is_sleeping": False,
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
    }
