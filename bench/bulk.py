"""How much of a bulk run's prompts is computed, how fast is it beside llama-server, and does it delay interactive jobs?

`shared`: 500 rows have the same 600 tokens at the beginning, as in a few-shot prompt, and then 32 tokens of their own.
The worker gets them as a bulk run, from file to file. llama-server gets them from as many parallel clients as it has
slots. `computed_per_distinct` is 1 if every token of the prompts' prefix tree was computed once.

`interactive`: time to the first token of short interactive jobs, one after the other, on an idle worker, and while a
bulk run keeps every slot busy. `target_ms` is twice the idle p95 plus one tick.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from harness import Figures, Plan, note, run, show
from job_timings import median_of, spread
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkRun, execute
from systems import CELL_BLOCK, Systems, distinct_tokens, round_up_to_cell_block, start_systems
from workload import Prompts, follow, greedy

QUEUE = "llamaq"
N_SLOTS = 8
N_ROWS, QUICK_N_ROWS = 500, 16
N_SHARED, QUICK_N_SHARED = 600, 64
N_OWN, N_OUT = 32, 16
N_PROBES, QUICK_N_PROBES = 40, 5
PROBE_TOKENS, PROBE_OUT = 24, 2
BUSY_OUT = 64


async def run_rows(prompts: list[list[int]], n_out: int, client: AsyncClient) -> Figures:
    """Compute the prompts as a bulk run, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        run = _write_run(Path(folder), prompts, n_out)
        start_s = time.perf_counter()
        progress = await execute(run, client)
        wall_s = time.perf_counter() - start_s
    if progress.rows_failed:
        raise RuntimeError(f"{progress.rows_failed} rows failed")
    return _figures(prompts, progress.prompt_tokens - progress.cached_tokens, progress.generated_tokens, wall_s)


def _write_run(folder: Path, prompts: list[list[int]], n_out: int) -> BulkRun:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in prompts))
    return BulkRun(input=source, output=folder / "answers.jsonl", options=dict(greedy(n_out)))


def _figures(prompts: list[list[int]], n_computed: int, n_generated: int, wall_s: float) -> Figures:
    return {
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(n_generated / wall_s, 1),
        "computed_tokens": n_computed,
        "computed_per_distinct": round(n_computed / distinct_tokens(prompts), 4),
    }


def ask_llama_server(systems: Systems, prompts: list[list[int]], n_out: int) -> Figures | None:
    """Send the prompts to llama-server from as many clients as it has slots. None: it is not installed."""
    server = systems.llama_server
    if server is None:
        return None
    start_s = time.perf_counter()
    with ThreadPoolExecutor(N_SLOTS) as clients:
        answers = list(clients.map(lambda prompt: server.generate([prompt], n_out)[0], prompts))
    wall_s = time.perf_counter() - start_s
    n_generated = sum(len(one.timeline.tokens) for one in answers)
    return _figures(prompts, sum(one.computed_tokens for one in answers), n_generated, wall_s)


def time_shared(systems: Systems, prompts: Prompts, n_rows: int, n_shared: int, *, worker_first: bool) -> Figures:
    """Return the figures of both systems for rows with one prefix."""
    shared = prompts.tokens(n_shared)
    rows = [shared + prompts.tokens(N_OWN) for _ in range(n_rows)]
    for system in systems.all.values():
        system.clear_cache()
    peer = None if worker_first else ask_llama_server(systems, rows, N_OUT)
    figures = {QUEUE: systems.stack.run(partial(run_rows, rows, N_OUT), QUEUE)}
    peer = ask_llama_server(systems, rows, N_OUT) if worker_first else peer
    if peer is not None:
        figures["llama-server"] = peer
        figures[QUEUE]["vs_peer"] = round(peer["wall_s"] / figures[QUEUE]["wall_s"], 3)
    note(", ".join(f"{name} {one['tokens_per_s']} tokens/s" for name, one in figures.items()))
    return figures


async def time_interactive(prompts: Prompts, n_probes: int, client: AsyncClient) -> Figures:
    """Return the time to the first token of interactive jobs without and with a bulk run."""
    idle_ms = [await _ttft_ms(client, prompts) for _ in range(n_probes)]
    stop = asyncio.Event()
    ticks_ms: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = _write_run(Path(folder), prompts.several(20 * n_probes + 64, 64), BUSY_OUT)
        running = asyncio.create_task(execute(run, client, stop=stop))
        await _until_busy(client)
        busy_ms = []
        for _ in range(n_probes):
            busy_ms.append(await _ttft_ms(client, prompts))
            ticks_ms += [worker.last_tick.eval_ms for worker in await client.workers() if worker.last_tick]
            await asyncio.sleep(0.1)  # the bulk run gets its slot back
        if running.done():
            raise RuntimeError("the bulk run ended too early")
        stop.set()
        await running
    idle, busy, tick_ms = spread(idle_ms), spread(busy_ms), spread(ticks_ms)["p50"]
    target_ms = round(2 * idle["p95"] + tick_ms, 2)
    figures = {"idle_ttft_ms": idle, "busy_ttft_ms": busy, "tick_ms": tick_ms, "target_ms": target_ms}
    note(f"interactive p95: idle {idle['p95']} ms, busy {busy['p95']} ms, target {target_ms} ms")
    return figures


async def _ttft_ms(client: AsyncClient, prompts: Prompts) -> float:
    return (await follow(client, prompts.tokens(PROBE_TOKENS), **greedy(PROBE_OUT))).ttft_ms


async def _until_busy(client: AsyncClient) -> None:
    while (await client.queue_depth()).running < N_SLOTS:  # noqa: ASYNC110  # Redis has no event for it
        await asyncio.sleep(0.05)


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    n_rows, n_shared = (QUICK_N_ROWS, QUICK_N_SHARED) if plan.quick else (N_ROWS, N_SHARED)
    n_probes = QUICK_N_PROBES if plan.quick else N_PROBES
    n_cells = (N_SLOTS + 1) * (n_shared + N_OWN + N_OUT + CELL_BLOCK)
    settings = plan.settings(n_parallel=N_SLOTS, n_ctx=round_up_to_cell_block(n_cells))
    shared, interactive = [], []
    with start_systems({QUEUE: settings}) as systems:
        prompts = Prompts(plan.seed, systems.n_vocab)
        for number in range(plan.rounds):
            shared.append(time_shared(systems, prompts, n_rows, n_shared, worker_first=number % 2 == 0))
            interactive.append(systems.stack.run(partial(time_interactive, prompts, n_probes), QUEUE))
        llama_server = systems.describe_llama_server()
    figures = {"shared": median_of(shared), "interactive": median_of(interactive)}
    rows = [(name, *one.values()) for name, one in figures["shared"].items()]
    show("rows with one prefix", ("", "wall s", "tokens/s", "computed", "per distinct", "of llama-server's"), rows)
    return {"rows": n_rows, "tokens_shared": n_shared, "tokens_own": N_OWN, "slots": N_SLOTS, **llama_server, **figures}


if __name__ == "__main__":
    run(measure)
