"""How much later does the first token of a job come if the job has a JSON schema?

Single jobs run on an idle worker, one after the other, through Redis and the client. Jobs of five kinds take turns:

- `none`: without a schema.
- `new`: a schema that was not used before. It has the keywords of most schemas.
- `again`: the schema of the job before.
- `new_unusual`: the same as `new`, with rare keywords: `patternProperties`, `multipleOf`, `propertyNames`, and the
  length of a string that has a format.
- `new_tried`: the same as `new`, with `allOf` of two patterns. A separate process tries such a schema first.

`ttft_ms` is the time from the submit to the first token in the client. `added_ms` is the median of a kind less the
median of `none`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial
from typing import Any

from harness import Figures, Plan, note, run, show, start_stack
from job_timings import spread
from json_schema_masks import MOST_NEW_SCHEMA_MS, make_schema
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import AsyncClient
from systems import check_target
from workload import Prompts, follow

N_TURNS, QUICK_N_TURNS = 100, 3
N_IN, N_OUT = 16, 4
PAUSE_S = 0.01
"""Between two jobs: the worker is idle again then."""
WARM_UP_REGEX = "[ab]{4}"


def make_unusual_schema(number: int) -> dict[str, Any]:
    """Return a schema of about the same size with rare keywords, different for each number."""
    schema = make_schema(number)
    schema["properties"]["score"] = {"type": "number", "multipleOf": 0.5}
    schema["properties"]["born"] = {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}
    schema["properties"]["tags"] = {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}
    return schema | {"patternProperties": {f"^x{number}_": {"type": "string"}}}


def make_tried_schema(number: int) -> dict[str, Any]:
    """Return a schema of about the same size that must be tried first, different for each number."""
    schema = make_schema(number)
    schema["properties"]["born"] = {"allOf": [{"type": "string", "pattern": "^[12]"}, {"pattern": "-[0-9]{2}$"}]}
    return schema


async def measure_turns(n_turns: int, prompts: Prompts, client: AsyncClient) -> dict[str, list[float]]:
    """Return the times to the first token of each kind of jobs, in milliseconds."""
    await _await_grammar_process(client)
    ttft_ms: dict[str, list[float]] = {}
    for number in range(n_turns):
        usual = make_schema(number)
        schemas = {
            "none": None,
            "new": usual,
            "again": usual,
            "new_unusual": make_unusual_schema(number),
            "new_tried": make_tried_schema(number),
        }
        for kind, schema in schemas.items():
            options: JobOptions = {"temperature": 0.0, "max_tokens": N_OUT, "cache_prompt": False}
            if schema is not None:
                options["json_schema"] = schema
            await asyncio.sleep(PAUSE_S)
            timeline = await follow(client, prompts.tokens(N_IN), **options)
            ttft_ms.setdefault(kind, []).append(timeline.ttft_ms)
    return ttft_ms


async def _await_grammar_process(client: AsyncClient) -> None:
    """Let the worker start the process that tries grammars, which a worker does by itself some time after its start."""
    started_s = time.perf_counter()
    await client.generate_tokens([1], regex=WARM_UP_REGEX, max_tokens=N_OUT, cache_prompt=False)
    note(f"the process for grammars has started after {time.perf_counter() - started_s:.2f} s")


def measure(plan: Plan) -> Figures:
    """Return the times to the first token, and what a schema adds to them."""
    n_turns = QUICK_N_TURNS if plan.quick else N_TURNS
    with start_stack([plan.settings(n_parallel=1)]) as stack:
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        ttft_ms = stack.run(partial(measure_turns, n_turns, prompts))
    medians = {kind: statistics.median(times_ms) for kind, times_ms in ttft_ms.items()}
    added_ms = {kind: round(one - medians["none"], 2) for kind, one in medians.items() if kind != "none"}
    spreads = {kind: spread(times_ms) for kind, times_ms in ttft_ms.items()}
    rows = [
        (kind.replace("_", " "), *one.values(), f"{added_ms[kind]:.2f}" if kind in added_ms else "-")
        for kind, one in spreads.items()
    ]
    show("time to the first token, ms", ("schema", "p50", "p95", "p99", "max", "added"), rows)
    kinds = ("new", "new_unusual", "new_tried")
    targets = {f"{kind}_added_ms": check_target(added_ms[kind], at_most=MOST_NEW_SCHEMA_MS) for kind in kinds}
    return {"jobs_of_each_kind": n_turns, "ttft_ms": spreads, "added_ms": added_ms, "targets": targets}


if __name__ == "__main__":
    run(measure)
