"""Answers, options and metrics in the form of llama-server."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.top_readings import make_worker

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result, TokenLogprobs
from llamaq.common.protocol.job_request import JobDefaults, JobRequest
from llamaq.common.protocol.queue_and_worker_state import LoraScale, QueueDepth
from llamaq.gateway.generation import limited
from llamaq.gateway.llama_metrics import metrics_text
from llamaq.gateway.native_format import NativeOptions, final_object, generation_settings, slot_object
from llamaq.gateway.routes.llama_server_completion import by_token
from llamaq.gateway.timings import timings_object
from llamaq.producer import Chunk
from llamaq.worker.generation.adapter_scales import AdapterScales

CARD = make_worker().card.model_copy(
    update={"context_limit": 256, "job_defaults": JobDefaults(temperature=0.3, seed=7), "end_tokens": (2, 5)}
)
STATS = JobStats(prompt_tokens=10, generated_tokens=4, duration_ms=40, ttft_ms=10, seed=9)


def result_of(n_tokens: int, reason: FinishReason = FinishReason.LENGTH) -> Result:
    stats = STATS.model_copy(update={"generated_tokens": n_tokens})
    tokens = tuple(range(n_tokens))
    return Result(job_id="q.0.1", text="a\nb", tokens=tokens, finish_reason=reason, stats=stats, seed=9)


def test_settings_of_a_job_are_its_options_over_the_defaults_of_the_worker() -> None:
    request = JobRequest(prompt="x", top_k=3, max_tokens=8, logit_bias={4: -1.5}, ignore_eos=True)
    settings = generation_settings(request, CARD, 9)
    assert (settings["temperature"], settings["top_k"], settings["seed"]) == (0.3, 3, 9)
    assert (settings["n_predict"], settings["max_tokens"]) == (8, 8)
    assert settings["repeat_last_n"] == JobDefaults().penalty_last_n
    # As with llama-server, a bias of null forbids a token.
    assert settings["logit_bias"] == [
        {"token": 4, "bias": -1.5},
        {"token": 2, "bias": None},
        {"token": 5, "bias": None},
    ]


def test_settings_without_options_are_the_defaults() -> None:
    settings = generation_settings(None, CARD, CARD.job_defaults.seed)
    assert (settings["temperature"], settings["seed"], settings["n_predict"]) == (0.3, 7, -1)
    assert settings["logit_bias"] == []


def test_settings_show_the_scale_of_each_adapter_that_the_worker_uses() -> None:
    names = ("1", "0", "twin", "twin")
    card = CARD.model_copy(update={"lora": tuple(LoraScale(name=name, scale=0.5) for name in names)})
    for lora in (None, {}, {"twin": 2.0}, {"3": 2.0}, {"1": 2.0}, {"2": 1.0, "0": 2.0}):
        shown = generation_settings(JobRequest(prompt="x", lora=lora), card, 9)["lora"]
        used = AdapterScales(card.lora).resolve(lora) or (0.5,) * 4
        assert shown == [{"id": number, "scale": scale} for number, scale in enumerate(used)]


@pytest.mark.parametrize(("max_tokens", "is_truncated"), [(4, False), (None, True)])
def test_an_answer_is_truncated_if_the_end_of_the_context_has_ended_it(
    max_tokens: int | None, is_truncated: bool
) -> None:
    request = JobRequest(prompt="x", max_tokens=max_tokens)
    answer = final_object(result_of(4), 0, request=request, card=CARD, model="m", has_tokens=True)
    assert answer["truncated"] is is_truncated
    assert answer["tokens"] == [0, 1, 2, 3]
    stopped = final_object(result_of(4, FinishReason.STOP), 0, request=request, card=CARD, model="m", has_tokens=False)
    assert (stopped["truncated"], stopped["tokens"], stopped["has_new_line"]) == (False, [], True)


def test_response_fields_choose_parts_of_an_answer_by_paths() -> None:
    options = NativeOptions.read({"response_fields": ["content", "generation_settings/top_k", "content/x", "missing"]})
    answer = {"content": "a", "generation_settings": {"top_k": 3}, "model": "m"}
    assert options.chosen(answer) == {"content": "a", "generation_settings/top_k": 3}
    assert NativeOptions.read({"response_fields": []}).chosen(answer) == answer
    with pytest.raises(InvalidRequest, match="response_fields"):
        NativeOptions.read({"response_fields": "content"})


def test_tokens_that_arrive_together_are_separate_events_if_they_have_probabilities() -> None:
    logprobs = (TokenLogprobs(-0.5, ()), TokenLogprobs(-0.25, ()))
    parts = by_token(Chunk("ab", (1, 2), 0, 0, logprobs))
    assert [(part.text, part.tokens, part.logprobs) for part in parts] == [
        ("", (1,), logprobs[:1]),
        ("ab", (2,), logprobs[1:]),
    ]
    plain = Chunk("ab", (1, 2), 0, 0)
    assert by_token(plain) == [plain]


@pytest.mark.parametrize(
    ("asked", "limit", "used"), [(None, None, None), (5, None, 5), (None, 8, 8), (9, 8, 9), (5, 8, 5)]
)
def test_a_server_bounds_answers_without_a_bound_of_their_own(
    asked: int | None, limit: int | None, used: int | None
) -> None:
    assert limited(JobRequest(prompt="x", max_tokens=asked), limit).max_tokens == used


def test_the_bound_of_a_server_is_not_below_the_minimum_of_a_request() -> None:
    assert limited(JobRequest(prompt="x", min_tokens=9), 8).max_tokens == 9
    assert limited(JobRequest(prompt="x", min_tokens=7), 8).max_tokens == 8


def test_rates_count_the_steps_after_the_first_token() -> None:
    timings = timings_object(STATS)
    assert (timings["predicted_n"], timings["predicted_ms"]) == (4, 30)
    assert timings["predicted_per_token_ms"] == 10
    assert timings["predicted_per_second"] == 100
    single = timings_object(STATS.model_copy(update={"generated_tokens": 1}))
    assert (single["predicted_per_token_ms"], single["predicted_per_second"]) == (0, 0)


def test_a_free_slot_shows_no_answer() -> None:
    worker = make_worker(jobs={1: ("chat.0.1", 3)}).model_copy(update={"card": CARD})
    free, busy = (slot_object(worker, worker.slots[index], index) for index in (0, 1))
    assert free["next_token"] == [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}]
    assert busy["next_token"][0]["n_decoded"] == 3
    assert (free["n_ctx"], free["is_processing"], busy["is_processing"]) == (256, False, True)


def test_metrics_are_sums_over_priorities_and_workers() -> None:
    counts = {
        "interactive:computed": 30, "bulk:computed": 10, "interactive:cached:device": 4, "bulk:cached:disk": 1,
        "interactive:output_tokens:sum": 20, "interactive:prompt_ms": 300, "bulk:prompt_ms": 100,
        "interactive:inter_token_ms:sum": 2000,
    }  # fmt: skip
    values: dict[str, Any] = {}
    depths = [QueueDepth(waiting=2, running=1), QueueDepth(waiting=3, running=0)]
    for line in metrics_text(counts, depths, [make_worker()]).splitlines():
        name, _, value = line.partition(" ")
        if not line.startswith("#"):
            values[name.removeprefix("llamacpp:")] = float(value)
    assert (values["prompt_tokens_total"], values["prompt_tokens_cached_total"]) == (40, 5)
    assert (values["tokens_predicted_total"], values["predicted_tokens_seconds"]) == (20, 10)
    assert (values["prompt_seconds_total"], values["prompt_tokens_seconds"]) == (0.4, 100)
    assert (values["requests_processing"], values["requests_deferred"]) == (1, 5)
