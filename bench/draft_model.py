"""What does `--speculation model` bring with a draft model that is always right, and what does it cost if it is wrong?

Random models do not resemble each other, so this benchmark has models of its own: `--model` has no effect. The model
has 24 layers, of which the last 22 add nothing. The draft model has the first two layers, so its logits are those of
the model: greedy jobs accept every draft. It takes about a seventh of the time of the model, like a draft model of
1 B parameters for a model of 7 B. Three workers with a draft model and one without run the same streamed jobs in turn:

- `right`: the draft model described above: what accepted drafts gain on this machine. A real draft model gains less.
- `wrong`: a draft model of the same size with other weights: nothing is accepted. This is what trials cost.
- `itself`: the model drafts for itself. No draft can gain anything, although all are accepted.

`speed_up` and `cpu_speed_up` are as in `speculation.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Figures, Plan, note, run, show, start_stack
from job_timings import median_of
from llamaq.tools.random_gguf import Architecture, ModelSpec, Weights
from random_models import ensure_spec
from speculation import Work, time_worker
from systems import check_target, range_of
from workload import Prompts, greedy

DRAFT = ModelSpec(
    Architecture.LLAMA,
    n_layers=2,
    n_embd=768,
    n_ff=2304,
    n_heads=12,
    n_kv_heads=6,
    head_dim=64,
    n_vocab=32_768,
    weights=Weights.F16,
)
TARGET = replace(DRAFT, n_layers=24, n_silent_layers=22)
QUICK_DRAFT = ModelSpec(Architecture.LLAMA, n_layers=1)
QUICK_TARGET = replace(QUICK_DRAFT, n_layers=4, n_silent_layers=3)
OFF, RIGHT, WRONG, ITSELF = "off", "right", "wrong", "itself"
NUMBERS, QUICK_NUMBERS = (1, 4), (1,)
N_IN, N_OUT = 64, 128
QUICK_N_IN, QUICK_N_OUT = 48, 32
WRONG_SEED = 7
SPEED_UP_TARGET, COST_TARGET = 1.2, 0.97


def start_settings(plan: Plan, n_slots: int) -> list[Any]:
    """Return the settings of the workers: one without speculation, and one for each draft model."""
    target, draft = (QUICK_TARGET, QUICK_DRAFT) if plan.quick else (TARGET, DRAFT)
    path = ensure_spec("draft-target", target)
    drafts: dict[str, Path] = {RIGHT: ensure_spec("draft", draft)}
    if not plan.quick:
        drafts |= {WRONG: ensure_spec("draft", draft, seed=WRONG_SEED), ITSELF: path}
    same = replace(plan, model=path)
    return [
        same.settings(n_parallel=n_slots, queue=OFF),
        *(
            same.settings(n_parallel=n_slots, queue=name, speculation="model", model_draft=str(file))
            for name, file in drafts.items()
        ),
    ]


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by draft model and number of jobs."""
    numbers = QUICK_NUMBERS if plan.quick else NUMBERS
    n_in, n_out = (QUICK_N_IN, QUICK_N_OUT) if plan.quick else (N_IN, N_OUT)
    workers = start_settings(plan, max(numbers))
    names = [one.queue for one in workers]
    rounds: dict[str, list[Figures]] = {}
    with start_stack(workers) as stack:
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        for turn in range(plan.rounds + (not plan.quick)):  # the first round warms up
            for number in numbers:
                jobs = [Work(prompt, greedy(n_out)) for prompt in prompts.several(number, n_in)]
                order = names if turn % 2 else names[::-1]
                measured = {name: time_worker(stack, name, jobs) for name in order}
                for name in names[1:]:
                    figures = _compare(measured[OFF], measured[name])
                    ratios = f"{figures['speed_up']:.2f} times as fast, by processor {figures['cpu_speed_up']:.2f}"
                    note(f"{name}, {number} at once: {ratios}")
                    if turn or plan.quick:
                        rounds.setdefault(f"{name}, {number}", []).append(figures)
    figures = {key: median_of(done) | {"range": range_of(done, "speed_up")} for key, done in rounds.items()}
    _show(figures)
    return {"tokens_in": n_in, "tokens_out": n_out, "drafts": figures, "targets": _check(figures)}


def _compare(off: tuple[Figures, list[list[int]]], on: tuple[Figures, list[list[int]]]) -> Figures:
    (without, expected), (with_drafts, outputs) = off, on
    cpu_off, cpu_on = (one["cpu_us_per_token"]["worker"] for one in (without, with_drafts))
    return {
        "off": without,
        "on": with_drafts,
        "speed_up": round(with_drafts["tokens_per_s"] / without["tokens_per_s"], 4),
        "cpu_speed_up": round(cpu_off / cpu_on, 4),
        "same_outputs": sum(one == other for one, other in zip(outputs, expected, strict=True)),
    }


def _check(figures: dict[str, Any]) -> Figures:
    """Return the targets: one greedy job is faster with the right draft model, and nothing is slower."""
    return {
        key: check_target(one["speed_up"], at_least=SPEED_UP_TARGET if key == "right, 1" else COST_TARGET)
        for key, one in figures.items()
    }


def _show(figures: dict[str, Any]) -> None:
    rows = [
        (
            *(key, one["off"]["tokens_per_s"], one["on"]["tokens_per_s"]),
            *(f"{one['speed_up']:.2f}", f"{one['cpu_speed_up']:.2f}"),
            *(one["on"]["drafted_tokens"], one["on"]["accepted_tokens"], one["same_outputs"]),
        )
        for key, one in figures.items()
    ]
    titles = ("draft model, jobs", "off tok/s", "on tok/s", "speed-up", "by cpu", "drafted", "accepted", "same")
    show("draft_model", titles, rows)


if __name__ == "__main__":
    run(measure)
