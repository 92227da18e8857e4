"""How long do running streams wait for their next token while a prompt of 3,000 tokens is prefilled?

Three jobs stream. Then a long prompt arrives, which the worker prefills in chunks. Each chunk is computed in one
tick together with the streams' decode tokens, 512 tokens in all. A hook in the worker measures the ticks.

- `longest_gap_ms`: the longest time between two arrivals at one subscriber during the prefill.
- `chunk_tick_ms`: duration of the ticks that compute a full chunk and one token of every stream.
- `gap_per_median_tick`: the longest gap divided by the median of these ticks; the target is at most 1.5. Later
  chunks take longer than earlier chunks, because their attention covers more cells. This difference raises the ratio.
- `gap_per_own_tick`: the longest gap divided by the slowest tick that ended within it. A ratio near 1 means that
  nothing but the tick delays the streams.
- `unchunked`: the same figures when the prompt is prefilled in as few ticks as `n_batch` allows.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness import Figures, Plan, note, path_with_this_folder, run, show, start_stack
from job_timings import median_of, spread
from streams_beside_prompt import Load, Timelines, run_on_worker
from workload import Prompts

TICKS_FILE = "BENCH_TICKS_FILE"
"""Environment variable: the file to which the hook of a worker writes its ticks."""
N_STREAMS = 3
N_OUT, QUICK_N_OUT = 160, 600
"""The streams must last until the long prompt is computed, and a quick run has a faster model."""
N_LONG, QUICK_N_LONG = 3000, 1000
CHUNK_SIZE, QUICK_CHUNK_SIZE = 512, 128
N_CTX = 8192
TARGET = 1.5


def record(name: str, measurements: Mapping[str, Any]) -> None:
    """Append a tick and the time of its end to the file. This hook runs in the process of the worker."""
    if name == "tick":
        with Path(os.environ[TICKS_FILE]).open("a") as file:
            file.write(json.dumps({"at_s": time.perf_counter(), **measurements}) + "\n")


def read_ticks(ticks_file: Path) -> list[dict[str, Any]]:
    """Return the ticks since the last call, and empty the file."""
    ticks = [json.loads(line) for line in ticks_file.read_text().splitlines()]
    ticks_file.write_text("")
    return ticks


def summarize(timelines: Timelines, ticks: list[dict[str, Any]], full_chunk: int) -> dict[str, Any]:
    """Return the figures of one round; `full_chunk` is the number of prompt tokens in a tick with a full chunk."""
    begin_s, end_s = max(timelines.gaps, key=lambda gap: gap[1] - gap[0])
    longest_ms = (end_s - begin_s) * 1000
    within_ms = max(tick["eval_ms"] for tick in ticks if begin_s < tick["at_s"] < end_s)
    chunk_tick = spread([tick["eval_ms"] for tick in ticks if _is_chunk_tick(tick, full_chunk)])
    return {
        "longest_gap_ms": round(longest_ms, 2),
        "tick_within_ms": round(within_ms, 2),
        "gap_per_own_tick": round(longest_ms / within_ms, 3),
        "gap_per_median_tick": round(longest_ms / chunk_tick["p50"], 3),
        "chunk_tick_ms": chunk_tick,
        "ttft_long_ms": round(timelines.long.ttft_ms, 1),
        "itl_ms": spread([gap for stream in timelines.streams for gap in stream.gaps_ms]),
    }


def _is_chunk_tick(tick: dict[str, Any], full_chunk: int) -> bool:
    return bool(tick["prefill_tokens"] >= full_chunk and tick["decode_tokens"] == N_STREAMS)


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds, for a prefill in chunks and for an unchunked prefill."""
    n_long, chunk_size = (QUICK_N_LONG, QUICK_CHUNK_SIZE) if plan.quick else (N_LONG, CHUNK_SIZE)
    n_out = QUICK_N_OUT if plan.quick else N_OUT
    n_batch = 2048
    with ExitStack() as exits:
        ticks_file = Path(exits.enter_context(tempfile.TemporaryDirectory())) / "ticks.jsonl"
        ticks_file.touch()
        os.environ |= {TICKS_FILE: str(ticks_file), "PYTHONPATH": path_with_this_folder()}
        sizes = {"chunked": chunk_size, "unchunked": n_batch}
        settings = [
            plan.settings(queue=name, n_ctx=N_CTX, n_batch=n_batch, chunk_size=size, hooks=("long_prompt:record",))
            for name, size in sizes.items()
        ]
        stack = exits.enter_context(start_stack(settings))
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sizes}
        for index in range(plan.rounds + 1):
            for name, size in sizes.items():
                load = Load.draw(prompts, N_STREAMS, n_long, n_out)
                timelines = stack.run(partial(run_on_worker, load), name)
                full_chunk = min(size - N_STREAMS, n_long)
                figures = summarize(timelines, read_ticks(ticks_file), full_chunk)
                if index or plan.quick:  # the first round warms up
                    rounds[name].append(figures)
                    note(f"{name}: longest gap {figures['longest_gap_ms']} ms")
    results = {name: median_of(figures) for name, figures in rounds.items()}
    _show(results)
    worst = max(figures["gap_per_median_tick"] for figures in rounds["chunked"])
    sizes_used = {"streams": N_STREAMS, "prompt_tokens": n_long, "chunk_size": chunk_size}
    verdict = {"target": TARGET, "is_met": results["chunked"]["gap_per_median_tick"] <= TARGET}
    return sizes_used | verdict | {"worst_gap_per_median_tick": worst} | results


def _show(results: dict[str, dict[str, Any]]) -> None:
    columns = ("prompt", "longest gap ms", "tick within", "gap/median", "median chunk tick", "TTFT of long", "ITL p50")
    rows = []
    for name, one in results.items():
        ratio, median_tick = f"{one['gap_per_median_tick']:.2f}", one["chunk_tick_ms"]["p50"]
        times = (one["longest_gap_ms"], one["tick_within_ms"], ratio, median_tick)
        rows.append((name, *times, one["ttft_long_ms"], one["itl_ms"]["p50"]))
    show("streams during the prefill of a long prompt", columns, rows)


if __name__ == "__main__":
    run(measure)
