"""Of 236 JSON schemas, how many does a worker accept, and does every output match its schema?

The schemas are those that pydantic makes for 101 types, and 135 that were written for this benchmark, in the manner of
test suites and API descriptions (`json_schemas.jsonl`). `json_schema_suites.py` reads schemas of other projects. Each
schema is sampled several times: `complete` outputs ended by themselves, `cut` ones reached the token limit. Tokens that
close strings, arrays and objects get a bias, because the model writes random text. A complete output that does not
match its schema is a fault of the worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness import ROOT, Figures, Plan, note, run, show, start_stack
from json_schema_pydantic import pydantic_schemas
from json_schema_validation import validation_error
from llamaq.common.errors import ErrorCode, JobFailed, RequestFailed
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import AsyncClient
from llamaq.producer.job_window.request_map import MappedResult

N_OUTPUTS, QUICK_N_OUTPUTS = 8, 1
QUICK_STEP = 16
"""A quick run takes every sixteenth schema."""
MAX_TOKENS, QUICK_MAX_TOKENS = 384, 64
CLOSING_TEXTS = ('"', "}", "]", '"}', '"]')
CLOSING_BIAS = 4.0
TEMPERATURE = 1.5

REFUSALS = (ErrorCode.INVALID_GRAMMAR, ErrorCode.INVALID_REQUEST)

Case = tuple[str, dict[str, Any]]
Answer = MappedResult | RequestFailed


def load_cases() -> list[Case]:
    """Return names and schemas."""
    written = map(json.loads, (ROOT / "bench" / "json_schemas.jsonl").read_text().splitlines())
    return [
        *((f"pydantic: {name}", schema) for name, schema in pydantic_schemas().items()),
        *((one["name"], one["schema"]) for one in written),
    ]


async def sample(
    cases: list[Case], n_outputs: int, max_tokens: int, seed: int, client: AsyncClient, temperature: float = TEMPERATURE
) -> list[Answer]:
    """Return `n_outputs` results or errors for each schema."""
    tokenizer = await client.tokenizer()
    bias = {tokens[-1]: CLOSING_BIAS for text in CLOSING_TEXTS if (tokens := tokenizer.encode(text))}
    requests = (
        {"prompt": "The answer as JSON: ", "json_schema": schema, "seed": seed + number}
        for _, schema in cases
        for number in range(n_outputs)
    )
    options: JobOptions = {
        "max_tokens": max_tokens, "logit_bias": bias, "temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0
    }  # fmt: skip
    return [answer async for answer in client.map(requests, raise_errors=False, **options)]


class Coverage:
    """Counts schemas and outputs."""

    def __init__(self) -> None:
        self.n_compiled = 0
        self.refused: dict[str, str] = {}
        """Maps the name of each refused schema to the message."""
        self.n_complete = 0
        self.n_cut = 0
        self.faults: list[str] = []
        """Complete outputs that do not match their schemas, and jobs that failed in the middle."""
        self.without_complete: list[str] = []
        """Schemas whose outputs are all cut."""

    def add(self, name: str, schema: dict[str, Any], answers: Sequence[Answer]) -> None:
        """Count the answers for one schema."""
        errors = [answer.error for answer in answers if isinstance(answer, RequestFailed)]
        results = [answer for answer in answers if not isinstance(answer, RequestFailed)]
        if errors and not results and all(isinstance(one, JobFailed) and one.code in REFUSALS for one in errors):
            self.refused[name] = str(errors[0])
            return
        self.n_compiled += 1
        self.faults += [f"{name}: {error!r}" for error in errors]
        complete = [result.text for result in results if result.finish_reason == "stop"]
        self.n_complete += len(complete)
        self.n_cut += len(results) - len(complete)
        if not complete:
            self.without_complete.append(name)
        for text in complete:
            error = validation_error(schema, text)
            if error is not None:
                self.faults.append(f"{name}: {text!r}: {error}")

    def figures(self) -> Figures:
        return {
            "compiled": self.n_compiled,
            "refused": len(self.refused),
            "outputs_complete": self.n_complete,
            "outputs_valid": self.n_complete - len(self.faults),
            "outputs_cut": self.n_cut,
            "without_complete_output": self.without_complete,
            "refusals": self.refused,
            "faults": self.faults,
        }


def measure(plan: Plan) -> Figures:
    """Return the numbers of schemas and outputs, and the messages of the refused schemas."""
    cases = load_cases()[:: QUICK_STEP if plan.quick else 1]
    n_outputs, max_tokens = (QUICK_N_OUTPUTS, QUICK_MAX_TOKENS) if plan.quick else (N_OUTPUTS, MAX_TOKENS)
    with start_stack([plan.settings()]) as stack:
        answers = stack.run(partial(sample, cases, n_outputs, max_tokens, plan.seed))
    coverage = Coverage()
    for index, (name, schema) in enumerate(cases):
        coverage.add(name, schema, answers[index * n_outputs : (index + 1) * n_outputs])
    figures = coverage.figures()
    for name, message in coverage.refused.items():
        note(f"refused: {name}: {message}")
    for fault in coverage.faults:
        note(f"FAULT: {fault}")
    rows = [(name.replace("_", " "), value) for name, value in figures.items() if isinstance(value, int)]
    show(f"{len(cases)} schemas, {n_outputs} outputs each", ("", ""), rows)
    return {"schemas": len(cases), "outputs_of_each": n_outputs, **figures}


if __name__ == "__main__":
    run(measure)
