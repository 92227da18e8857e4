"""The tags of reasoning reach the job with its budget."""

from __future__ import annotations

from typing import Any

import pytest

from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, form_of
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import read_body
from llamaq.producer.openai_format.tools import ToolChoice, form_options
from llamaq.producer.option_synonyms import translate

NAMES = ["reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [("[THINK] [/THINK]", "[THINK]", "[/THINK]"), ("<|channel|>", "<|channel|>analysis<|message|>", "<|end|>")],
)
def test_the_budget_of_a_request_has_the_tags_of_the_template(
    name: str, template: str, opening: str, closing: str
) -> None:
    (job,) = read_body(Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}], name: 5}).jobs
    given: dict[str, Any] = translate({**job, **form_options(form_of(template), ToolChoice(), job)})
    assert (given["reasoning_budget"], given["reasoning_open"], given["reasoning_close"]) == (5, opening, closing)


def test_without_a_budget_or_tags_the_job_has_none() -> None:
    assert form_options(form_of("[THINK] [/THINK]"), ToolChoice(), {}) == {"special": True}
    assert form_options(CONTENT_ALONE, ToolChoice(), {"reasoning_budget": 5}) == {}
    assert "reasoning_budget" not in translate({"prompt": "x", "reasoning_budget_tokens": -1})
