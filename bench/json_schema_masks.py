"""What does a JSON schema cost: the time to compile a new schema, and the time of a token's mask?

The vocabulary is that of `--model` (tiny: 151,936 tokens). `new_schema_ms`: a schema that was not used before, from the
request to the compiled constraint. Its keywords are of the usual kinds, so no other process tries it. `again_ms`: the
same schema in a later job. `new_tools_ms`: the same as `new_schema_ms` for new sets of tools, one of which must be
called, by the number of tools. `mask_ms`: to accept a token and compute the mask of the next. `disagreeing_ms`: to
sample a token whose logits are random, so the model mostly wants tokens that the schema does not allow, less the same
without a schema.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from harness import Figures, Plan, run, show
from job_timings import spread
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.producer.answer_parts.answer_format import AnswerForm, AnswerFormat
from llamaq.producer.answer_parts.answer_grammar import answer_grammar
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer, TokenConstraint
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from systems import check_target

N_SCHEMAS, QUICK_N_SCHEMAS = 200, 2
N_TOKENS, QUICK_N_TOKENS = 60, 10
N_TOOLS = (1, 5, 20)
MOST_NEW_SCHEMA_MS = 5.0
MOST_TOKEN_MS = 0.3


def make_schema(number: int) -> dict[str, Any]:
    """Return a schema of a record, different for each number."""
    address = {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^\\d{5}$"}}}
    properties = {
        f"name_{number}": {"type": "string", "minLength": 1, "maxLength": 40 + number},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["person", "company", f"other {number}"]},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "addresses": {"type": "array", "items": {"$ref": "#/$defs/address"}},
        "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    }
    return {"type": "object", "properties": properties, "required": list(properties), "$defs": {"address": address}}


def make_tool(number: int) -> dict[str, Any]:
    """Return a tool with four parameters, different for each number."""
    properties = {
        f"query_{number}": {"type": "string", "description": "The text to look for, in plain words."},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
        "order": {"type": "string", "enum": ["newest", "oldest", f"rank {number}"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    }
    parameters = {"type": "object", "properties": properties, "required": [f"query_{number}"]}
    function = {"name": f"search_{number}", "description": "Searches the records.", "parameters": parameters}
    return {"type": "function", "function": function}


class Costs:
    """Times of the parts that a worker runs for a schema, in milliseconds."""

    def __init__(self, vocab: Vocab, sandbox: GrammarSandbox, seed: int) -> None:
        self._vocab = vocab
        self._sandbox = sandbox
        self._tokenizer = ConstraintTokenizer(vocab)
        self._random = np.random.default_rng(seed)
        self._params = SamplingDefaults()
        self.new_schema_ms: list[float] = []
        self.new_tools_ms: dict[int, list[float]] = {n_tools: [] for n_tools in N_TOOLS}
        self.again_ms: list[float] = []
        self.mask_ms: list[float] = []
        self.disagreeing_ms: list[float] = []

    def add(self, schema: dict[str, Any], n_tokens: int) -> None:
        """Measure a schema, and outputs of it with random logits."""
        request = JobParams(json_schema=schema)
        _, elapsed_ms = _timed(partial(self._compile, request))
        self.new_schema_ms.append(elapsed_ms)
        constraint, elapsed_ms = _timed(partial(self._compile, request))
        self.again_ms.append(elapsed_ms)
        again = self._compile(request)
        sampler = LogitSampler(self._params, seed=1, grammar=constraint)
        free = LogitSampler(self._params, seed=1)
        history: list[int] = []
        while len(history) < n_tokens:
            logits = self._random.normal(size=self._vocab.n_tokens).astype(np.float32)
            without = logits.copy()
            token, with_schema_ms = _timed(partial(sampler.sample, logits, history, 0))
            _, without_ms = _timed(partial(free.sample, without, history, 0))
            if token in self._vocab.end_tokens:
                break
            history.append(token)
            self.disagreeing_ms.append(with_schema_ms - without_ms)
            _, accept_ms = _timed(partial(again.accept, history))
            self.mask_ms.append(accept_ms + _timed(again.allowed_tokens)[1])

    def add_tools(self, number: int) -> None:
        """Measure new sets of tools."""
        form = AnswerForm(format=AnswerFormat.HERMES, has_tools=True)
        for n_tools, times_ms in self.new_tools_ms.items():
            tools = [make_tool(100 * number + each) for each in range(n_tools)]
            request = JobParams(lark=answer_grammar(form, tools))
            times_ms.append(_timed(partial(self._compile, request))[1])

    def _compile(self, request: JobParams) -> TokenConstraint:
        return self._tokenizer.compile(self._sandbox.check(request).text)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start_s = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - start_s) * 1000


def measure(plan: Plan) -> Figures:
    """Return the times."""
    n_schemas, n_tokens = (QUICK_N_SCHEMAS, QUICK_N_TOKENS) if plan.quick else (N_SCHEMAS, N_TOKENS)
    vocab = Vocab.from_blob(extract_vocab(plan.model))
    sandbox = GrammarSandbox(vocab)
    try:
        costs = Costs(vocab, sandbox, plan.seed)
        sandbox.check(JobParams(regex="a"))  # starts the process
        for number in range(n_schemas):
            costs.add(make_schema(number), n_tokens)
            costs.add_tools(number)
    finally:
        sandbox.close()
    figures = {
        name: spread(getattr(costs, name)) for name in ("new_schema_ms", "again_ms", "mask_ms", "disagreeing_ms")
    }
    new_tools_ms = {str(n_tools): spread(times_ms) for n_tools, times_ms in costs.new_tools_ms.items()}
    rows = figures | {f"{n_tools} new tools": one for n_tools, one in new_tools_ms.items()}
    show(
        f"JSON schemas, {vocab.n_tokens:,} tokens",
        ("ms", "p50", "p95", "p99", "max"),
        [(name.removesuffix("_ms").replace("_", " "), *(str(x) for x in one.values())) for name, one in rows.items()],
    )
    targets = {
        "new_schema_ms": check_target(figures["new_schema_ms"]["p50"], at_most=MOST_NEW_SCHEMA_MS),
        "token_ms": check_target(figures["disagreeing_ms"]["p50"], at_most=MOST_TOKEN_MS),
    }
    return {
        "n_vocab": vocab.n_tokens,
        "schemas": n_schemas,
        **figures,
        "new_tools_ms": new_tools_ms,
        "targets": targets,
    }


if __name__ == "__main__":
    run(measure)
