"""A request of SillyTavern for llama.cpp, whose fields also name the options of many other servers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.http_clients import http_client

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

PRESET: dict[str, Any] = {
    "max_new_tokens": 12, "max_tokens": 12, "n_predict": 12, "num_predict": 12, "num_ctx": 4096,
    "logprobs": 10, "n_probs": 10, "n": 1,
    "temperature": 1, "top_p": 1, "typical_p": 1, "typical": 1, "min_p": 0.1, "top_k": 0, "top_a": 0, "tfs": 1,
    "top_n_sigma": 0, "nsigma": 0, "min_keep": 0, "skew": 0, "smoothing_factor": 0, "smoothing_curve": 1,
    "repetition_penalty": 1, "repeat_penalty": 1, "rep_pen": 1, "rep_pen_range": 0, "rep_pen_slope": 1,
    "repetition_penalty_range": 0, "repeat_last_n": 0, "frequency_penalty": 0, "presence_penalty": 0,
    "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75, "dry_penalty_last_n": 0,
    "dry_sequence_breakers": ["\n", ":", "\"", "*"],
    "xtc_threshold": 0.1, "xtc_probability": 0, "mirostat": 0, "mirostat_mode": 0, "mirostat_tau": 5,
    "mirostat_eta": 0.1, "adaptive_target": -0.01, "adaptive_decay": 0.9,
    "samplers": ["top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"],
    "min_tokens": 0, "max_tokens_second": 0, "add_bos_token": True, "ban_eos_token": False, "ignore_eos": False,
    "skip_special_tokens": True, "include_reasoning": True, "truncation_length": 4096,
    "stop": ["\nUser:"], "stopping_strings": ["\nUser:"], "custom_token_bans": "", "banned_strings": [],
    "guidance_scale": 1, "negative_prompt": "", "grammar": "", "logit_bias": [], "cache_prompt": True, "seed": 5,
    "api_type": "llamacpp", "api_server": "http://127.0.0.1:8080/",
}  # fmt: skip
"""The fields of `createTextGenGenerationData` in SillyTavern's textgen-settings.js, with its default preset. The preset
names the sampler tail-free, which llama.cpp had until 2024."""


async def test_sillytavern_gets_its_text(demo: ServedQueue) -> None:
    body = {**PRESET, "prompt": "User: Hello\nAssistant:", "stream": False}
    async with http_client(demo) as http:
        whole = await http.post("/completion", json=body)
        streamed = await http.post("/completion", json={**body, "stream": True})
    assert whole.status_code == streamed.status_code == 200, whole.text + streamed.text
    lines = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(line["content"] for line in lines) == whole.json()["content"]
    assert len(whole.json()["completion_probabilities"][0]["top_logprobs"]) == 10


async def test_a_group_chat_has_a_stop_string_for_each_member(demo: ServedQueue) -> None:
    body = {**PRESET, "prompt": "Hello", "stop": [f"\nMember {number}:" for number in range(40)]}
    async with http_client(demo) as http:
        answer = await http.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
