"""The form of llama-server's own endpoints: requests and answers of `/completion`, slots, properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, Self

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import FinishReason, Result
from llamaq.common.protocol.job_request import JobDefaults, JobParams, JobRequest
from llamaq.common.protocol.queue_and_worker_state import LoraScale, SlotSnapshot, Worker, WorkerCard, adapter_places
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.gateway.timings import timings_object
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import GenerationBody, read_body, read_flag, refuse_unsupported

RANDOM_SEED = 2**32 - 1
"""The seed that stands for a random one in llama-server."""
_MISSING = object()

STOP_TYPES = {
    FinishReason.STOP: "eos",
    FinishReason.LENGTH: "limit",
    FinishReason.DEADLINE: "limit",
    FinishReason.CANCELLED: "none",
}


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """The options of a request to `/completion` that only concern the form of its answer."""

    has_tokens: bool
    """Whether the answer has the token ids."""
    has_drawn_probs: bool
    """Whether probabilities are those of the draw. Then they are numbers from 0 to 1, and not logarithms."""
    fields: tuple[str, ...]
    """The only fields of the answer, such as `content` or `generation_settings/n_predict`. Empty: all."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Return the options of a body.

        Raises:
            InvalidRequest: A field has a form that is not supported.
        """
        fields = body.get("response_fields") or []
        if not isinstance(fields, list) or not all(isinstance(each, str) for each in fields):
            raise InvalidRequest("response_fields: a list of names is required")
        return cls(
            has_tokens=read_flag(body, "return_tokens"),
            has_drawn_probs=read_flag(body, "post_sampling_probs"),
            fields=tuple(fields),
        )

    def chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of an answer that the request wants. A name may be a path, with `/` between its parts."""
        if not self.fields:
            return answer
        found = {}
        for path in self.fields:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                found[path] = value
        return found


def drawn_object(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a token in `completion_probabilities` with its probability in the draw.

    Args:
        entry: The entry with logarithms.
    """
    drawn = {name: entry[name] for name in ("id", "token", "bytes")} | {"prob": exp(entry["logprob"])}
    if "top_logprobs" in entry:
        drawn["top_probs"] = [drawn_object(each) for each in entry["top_logprobs"]]
    return drawn


def read_native_body(body: Mapping[str, Any]) -> GenerationBody:
    """Return what the body of `/completion` asks for. It has the fields of a completion; `n` is also accepted under the
    name `n_cmpl`.

    Raises:
        InvalidRequest: The body has no prompt, or a field that is not supported.
    """
    if "prompt" not in body:
        raise InvalidRequest("prompt: a text, a list of token ids, or a list of these is required")
    refuse_unsupported(body)
    renamed = {**body, "n": body.get("n_cmpl", body.get("n")), "echo": None}  # as llama-server, which ignores it
    return read_body(Endpoint.COMPLETIONS, renamed)


def final_object(
    result: Result, index: int, *, request: JobRequest, card: WorkerCard | None, model: str, has_tokens: bool
) -> dict[str, Any]:
    """Return the answer to `/completion`.

    Args:
        result: The result of the job.
        index: The number of the choice.
        request: The job.
        card: The card of a worker of the queue. None: no live worker serves it.
        model: The name of the model that the answer shows.
        has_tokens: Whether the answer has the token ids.
    """
    stats = result.stats
    return {
        "index": index,
        "content": result.text,
        "tokens": list(result.tokens) if has_tokens else [],
        "id_slot": stats.slot if stats.slot is not None else -1,
        "stop": True,
        "model": model,
        "tokens_predicted": stats.generated_tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "generation_settings": generation_settings(request, card, stats.seed),
        "prompt": request.prompt if request.prompt is not None else list(request.tokens or ()),
        "has_new_line": "\n" in result.text,
        "truncated": is_truncated(result, request),
        "stop_type": stop_type(result),
        "stopping_word": stats.stop_string or "",
        "tokens_cached": stats.prompt_tokens + stats.generated_tokens - 1,
        "timings": timings_object(stats),
    }


def is_truncated(result: Result, request: JobRequest) -> bool:
    """Return whether the end of the context has ended the answer."""
    at_limit = request.max_tokens is not None and result.stats.generated_tokens >= request.max_tokens
    return result.finish_reason is FinishReason.LENGTH and not at_limit


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


def generation_settings(request: JobRequest | None, card: WorkerCard | None, seed: int | None) -> dict[str, Any]:
    """Return the options of a job under the names of llama-server, with the defaults of the worker.

    Args:
        request: The job. None: a job without options of its own.
        card: The card of a worker of the queue. None: no live worker serves it.
        seed: The seed of the job.
    """
    defaults = JobDefaults() if card is None else card.job_defaults
    sampling = defaults if request is None else defaults.resolve(request)
    given = JobParams() if request is None else request
    limit = -1 if given.max_tokens is None else given.max_tokens
    biases: list[dict[str, Any]] = [{"token": token, "bias": bias} for token, bias in given.logit_bias.items()]
    if given.ignore_eos and card is not None:
        biases += [{"token": token, "bias": None} for token in card.end_tokens]
    return {
        **sampling.model_dump(mode="json", include=set(SamplingDefaults.model_fields)),
        "repeat_last_n": sampling.penalty_last_n,
        "seed": RANDOM_SEED if seed is None else seed,
        "max_tokens": limit,
        "n_predict": limit,
        "stop": list(given.stop),
        "ignore_eos": given.ignore_eos,
        "logit_bias": biases,
        "n_probs": given.logprobs or 0,
        "post_sampling_probs": given.post_sampling_probs,
        "reasoning_budget_tokens": -1 if given.reasoning_budget is None else given.reasoning_budget,
        "grammar": given.grammar or "",
        "stream": given.stream,
        "lora": [] if card is None else _adapter_scales(card.lora, given.lora),
    }


def _adapter_scales(adapters: Sequence[LoraScale], given: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """Return the number and the scale of each adapter, for a job with the option `lora` that is `given`."""
    if given is None:
        return [{"id": number, "scale": each.scale} for number, each in enumerate(adapters)]
    places = adapter_places(adapters)
    scales = {places[name]: scale for name, scale in given.items() if name in places}
    return [{"id": number, "scale": scales.get(number, 0.0)} for number in range(len(adapters))]


def slot_object(worker: Worker, slot: SlotSnapshot, slot_id: int) -> dict[str, Any]:
    """Return an entry of `/slots`.

    Args:
        worker: The worker that has the slot.
        slot: The slot.
        slot_id: Its number among the slots of all workers of the queue.
    """
    return {
        "id": slot_id,
        "n_ctx": worker.card.context_limit,
        "speculative": worker.card.speculation != "off",
        "is_processing": slot.job_id is not None,
        "id_task": slot.job_id,
        "state": slot.state,
        "n_prompt_tokens": slot.prompt_tokens,
        "n_prompt_tokens_processed": max(slot.prefilled_tokens - slot.cached_tokens, 0),
        "n_prompt_tokens_cache": slot.cached_tokens,
        "next_token": [_next_token(slot)],
        "worker": worker.card.worker,
        "slot": slot.index,
    }


def _next_token(slot: SlotSnapshot) -> dict[str, Any]:
    """Return the progress of the answer of a slot. A free slot has no answer, although the last one is still in its
    cells.
    """
    if slot.job_id is None:
        return {"has_next_token": False, "n_remain": -1, "n_decoded": 0}
    n_remain = max(slot.max_generated_tokens - slot.generated_tokens, 0)
    return {"has_next_token": True, "n_remain": n_remain, "n_decoded": slot.generated_tokens}


def adapter_objects(card: WorkerCard) -> list[dict[str, Any]]:
    """Return the entries of `/lora-adapters`."""
    return [{"id": number, "path": each.name, "scale": each.scale} for number, each in enumerate(card.lora)]


def props_object(queue: str, workers: Sequence[Worker]) -> dict[str, Any]:
    """Return `/props` of a queue with live workers."""
    card = workers[0].card
    return {
        "default_generation_settings": {
            "params": generation_settings(None, card, card.job_defaults.seed),
            "n_ctx": card.context_limit,
        },
        "total_slots": sum(worker.card.n_parallel for worker in workers),
        "model_alias": queue,
        "model_path": card.model,
        "modalities": {"vision": False, "audio": False},
        "chat_template": card.chat_template or "",
        "chat_template_caps": {},
        "bos_token": card.bos_token,
        "eos_token": card.eos_token,
        "build_info": f"llamaq-{card.version}",
        "is_sleeping": False,
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
    }


def tokenizer_object(card: WorkerCard) -> dict[str, Any]:
    """Return vLLM's `/tokenizer_info` of a worker's model. `None` stands for what the model does not have."""
    return {
        "tokenizer_class": "GGUF",
        "bos_token": card.bos_token or None,
        "eos_token": card.eos_token or None,
        "pad_token": None,
        "model_max_length": card.n_ctx_train,
        "chat_template": card.chat_template,
    }
