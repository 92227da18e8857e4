"""Writes a table and plots of the output of benchmarks in a folder: `python bench/results_page.py bench/results`.

The folder has a file `NAME.json` for each benchmark, with its line of JSON. `README.md` and files `*.svg` are written
beside them. This script runs in the environment of `make bench-peers`, which has matplotlib and not llamaq.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
Rows = Sequence[tuple[str, Mapping[str, float]]]
"""Names of groups of bars, and the value of each bar by name."""

HEADER = """# Results of `make bench-peers`

Written by `bench/results_page.py`. [bench/README.md](../README.md) describes the benchmarks and says how to read them.
"""


def overhead_rows(figures: Result) -> Rows:
    """Return tokens per second as a share of the bare loop, for each number and kind of jobs."""
    kinds = ("greedy", "sampled", "schema")
    return [
        (f"{kind}, {number}", {name: one["vs_bare"] for name, one in jobs[kind].items() if "vs_bare" in one})
        for kind in kinds
        for number, jobs in figures["jobs"].items()
    ]


def gap_rows(figures: Result) -> Rows:
    """Return the gaps of the streams while a prompt is computed, for each system."""
    return [(name, {"p50": one["gap_ms"]["p50"], "p95": one["gap_ms"]["p95"]}) for name, one in _systems(figures)]


def ttft_rows(figures: Result) -> Rows:
    """Return the time to the first token of the long prompt, for each system."""
    return [(name, {"TTFT": one["ttft_long_ms"]}) for name, one in _systems(figures)]


def latency_rows(figures: Result) -> Rows:
    """Return the latencies of the queue, for each engine."""
    return [
        (f"{engine}: {name.removesuffix('_ms').replace('_', ' ')}", {at: values[at] for at in ("p50", "p99")})
        for engine, one in figures["engines"].items()
        for name, values in one.items()
    ]


def throughput_rows(figures: Result) -> Rows:
    """Return the jobs per second of each system."""
    return [(name, {"jobs/s": one["jobs_per_s"]}) for name, one in _systems(figures)]


def _systems(figures: Result) -> list[tuple[str, Any]]:
    return list(figures["systems"].items())


PLOTS: dict[str, dict[str, tuple[str, Callable[[Result], Rows], bool]]] = {
    "overhead": {"overhead": ("tokens per second, as a share of the bare loop", overhead_rows, False)},
    "itl_under_prefill": {
        "itl_under_prefill": ("gaps of 7 streams while a long prompt is computed, ms", gap_rows, True),
        "ttft_under_streams": ("time to the first token of that prompt, ms", ttft_rows, False),
    },
    "queue_latency": {"queue_latency": ("latency of the queue, ms", latency_rows, False)},
    "queue_throughput": {"queue_throughput": ("jobs per second, engine that computes nothing", throughput_rows, True)},
}
"""Maps each benchmark to its plots: title, rows, and whether the scale is logarithmic."""


def read_results(folder: Path) -> dict[str, Result]:
    """Return the last line of each file that has one, by benchmark."""
    lines = {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.json"))}
    return {name: json.loads(found[-1]) for name, found in lines.items() if found}


def describe(results: Mapping[str, Result]) -> str:
    """Return the page: what was measured on which machine, the targets, and the plots."""
    parts = [HEADER]
    for name, result in results.items():
        hardware = result["hardware"]
        machine = f"{hardware['cores']} cores of {hardware['cpu']}, load {hardware['load_before']} before the run"
        commit = f"commit {str(result['commit'])[:10]}{', with changes' if result['changed_since_commit'] else ''}"
        ticks = "compiled ticks" if result["compiled"] else "interpreted ticks"
        about = f"{result['date']}, model `{result['model']}`, {result['rounds']} rounds, {ticks}, {machine}, {commit}"
        parts += [f"## {name}", about + ".", *_tables(name, result["figures"])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _tables(name: str, figures: Result) -> list[str]:
    tables = []
    if targets := dict(_targets(figures.get("targets", {}))):
        checks = [
            f"| {target} | {one['value']:g} | {one['target']:g} | {'yes' if one['is_met'] else '**no**'} |"
            for target, one in targets.items()
        ]
        tables.append("\n".join(["| target | measured | wanted | met |", "| --- | --- | --- | --- |", *checks]))
    for plot, (title, rows_of, _) in PLOTS.get(name, {}).items():
        rows = rows_of(figures)
        columns = list(rows[0][1])
        lines = [f"| {group} | {' | '.join(f'{bars.get(one, 0):g}' for one in columns)} |" for group, bars in rows]
        head = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
        tables += [f"{title[0].upper()}{title[1:]}:", "\n".join([*head, *lines]), f"![{title}]({plot}.svg)"]
    return tables


def _targets(targets: Any, prefix: str = "") -> list[tuple[str, Result]]:
    """Return all targets with their names. Some benchmarks have groups of targets."""
    if not isinstance(targets, dict):
        return []
    if "is_met" in targets:
        return [(prefix, targets)]
    return [found for key, one in targets.items() for found in _targets(one, f"{prefix} {key}".strip())]


def draw(path: Path, title: str, rows: Rows, *, is_log: bool) -> None:
    """Write groups of horizontal bars as SVG."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llamaq"  # equal figures give equal files
    pyplot = importlib.import_module("matplotlib.pyplot")
    names = list(rows[0][1])
    height = 0.8 / len(names)
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + len(rows) * (0.2 + 0.2 * len(names))), layout="constrained")
    for index, name in enumerate(names):
        at = [row + index * height for row in range(len(rows))]
        bars = axes.barh(at, [values.get(name, 0) for _, values in rows], height, label=name)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(rows))], [group for group, _ in rows])
    axes.invert_yaxis()
    axes.set_title(title)
    axes.margins(x=0.12)
    if is_log:
        axes.set_xscale("log")
    if len(names) > 1:
        axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    """Write the page, and the plots of each benchmark whose result is in the folder."""
    results = read_results(folder)
    (folder / "README.md").write_text(describe(results))
    for name, result in results.items():
        for plot, (title, rows_of, is_log) in PLOTS.get(name, {}).items():
            draw(folder / f"{plot}.svg", title, rows_of(result["figures"]), is_log=is_log)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
