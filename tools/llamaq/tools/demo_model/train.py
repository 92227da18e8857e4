"""Trains the demo model: `python -m llamaq.tools.demo_model.train --out build/demo_model`.

The same seed gives the same texts and the same initial weights. Training ends after `--tokens` or after `--minutes`,
whichever is reached first. Row lengths, mixtures and learning rate depend on the progress: the share of the tokens or
the share of the minutes, whichever is larger. `--resume` continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from llamaq.tools.demo_model.dialogues import conversation
from llamaq.tools.demo_model.document import ASSISTANT, BOS, END, USER
from llamaq.tools.demo_model.fact_questions import recall_probe
from llamaq.tools.demo_model.initial_weights import set_initial_weights
from llamaq.tools.demo_model.model import DemoModel, ModelShape
from llamaq.tools.demo_model.seeded_choice import Split
from llamaq.tools.demo_model.stories import story_document
from llamaq.tools.demo_model.tokenizer import load_or_train
from llamaq.tools.demo_model.training_batches import draw_batch, encode
from llamaq.tools.demo_model.training_schedule import draw_length, rate_at, stage_at

LOSS_SMOOTHING = 0.98
PROBE_DISTANCES = (20, 50, 200, 400, 800, 1500)
PROBES = 24
MAX_SHAPES = 32
"""Upper bound on the number of pairs of batch size and row length in the curriculum.

torch.compile compiles separate code for each pair.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a training run."""

    out: Path
    tokens: int
    minutes: float
    eval_minutes: float
    seed: int
    matrix_rate: float
    vector_rate: float
    threads: int
    compile: bool
    bf16: bool


@dataclass
class State:
    """Progress of a run. It is saved with each checkpoint."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)


def make_optimizers(model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if name.startswith("blk") and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("blk") and p.ndim == 2)]
    return [
        torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


class Training:
    """A model, its optimizers and the state of the run."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        torch.manual_seed(plan.seed)
        plan.out.mkdir(parents=True, exist_ok=True)
        self.plan = plan
        self.tokenizer: Tokenizer = load_or_train(plan.out / "tokenizer.json", plan.seed)
        self.shape = ModelShape(vocabulary=self.tokenizer.get_vocab_size())
        self.model = DemoModel(self.shape)
        set_initial_weights(self.model)
        self.loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = self.weighted_loss
        if plan.compile:
            self.loss = torch.compile(self.weighted_loss, dynamic=False, recompile_limit=MAX_SHAPES)
        self.optimizers = make_optimizers(self.model, plan)
        self.state = State()

    @property
    def progress(self) -> float:
        """Progress from 0 to 1: the larger of the share of the tokens and the share of the time."""
        return min(1.0, max(self.state.tokens / self.plan.tokens, self.state.elapsed_s / 60 / self.plan.minutes))

    def step(self) -> None:
        """Train on one batch: forward, backward, update."""
        progress = self.progress
        stage = stage_at(progress)
        seed = f"{self.plan.seed}:{self.state.step}"
        length = draw_length(stage, seed)
        batch = draw_batch(self.tokenizer, stage.mixture, seed, stage.batch_tokens // length, length)
        loss = self.loss(batch.ids, batch.targets, batch.weights, batch.mask())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, (self.plan.matrix_rate, self.plan.vector_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_at(progress)
            optimizer.step()
            optimizer.zero_grad()
        self.update_mean_loss("loss", loss.item())
        self.state.step += 1
        self.state.tokens += batch.ids.numel()

    def weighted_loss(self, ids: Tensor, targets: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token, weighted by the loss weights."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.plan.bf16):
            logits = self.model(ids, mask)
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()

    def update_mean_loss(self, name: str, value: float) -> None:
        """Update the running mean of a loss."""
        old = self.state.losses.get(name, value)
        self.state.losses[name] = LOSS_SMOOTHING * old + (1 - LOSS_SMOOTHING) * value

    @torch.no_grad()
    def recall(self, distance: int) -> float:
        """Return the share of held-out probes with a right greedy answer.

        An answer is right if each of its tokens has the largest logit after the tokens before it.
        """
        right = 0
        for seed in range(PROBES):
            probe = recall_probe(seed, distance)
            prompt = self.tokenizer.encode(probe.text).ids
            answer = self.tokenizer.encode(probe.answer).ids
            logits = self.model(torch.tensor([prompt + answer]))
            guesses = logits[0, len(prompt) - 1 : -1].argmax(-1)
            right += int(guesses.tolist() == answer)
        return right / PROBES

    @torch.no_grad()
    def chat_recall(self) -> float:
        """Return the share of right greedy answers in held-out conversations.

        The context of each answer contains the right answers of all earlier turns.
        """
        right = asked = 0
        for seed in range(PROBES):
            ids = self.tokenizer.encode(BOS).ids
            answers = []
            for turn in conversation(Split.HELD_OUT, seed):
                ids += self.tokenizer.encode(USER + turn.user + END + ASSISTANT).ids
                answer = self.tokenizer.encode(turn.assistant + END).ids
                if turn.recalled is not None:
                    answers.append((len(ids), answer))
                ids += answer
            guesses = self.model(torch.tensor([ids]))[0].argmax(-1).tolist()
            right += sum(guesses[start - 1 : start - 1 + len(answer)] == answer for start, answer in answers)
            asked += len(answers)
        return right / asked

    @torch.no_grad()
    def story_loss(self) -> float:
        """Return the mean loss of held-out stories in nats per token."""
        losses = []
        for seed in range(PROBES):
            ids = torch.tensor([encode(self.tokenizer, story_document(Split.HELD_OUT, seed))[0]])
            losses.append(functional.cross_entropy(self.model(ids[:, :-1])[0], ids[0, 1:]).item())
        return sum(losses) / len(losses)

    def report(self) -> dict[str, Any]:
        """Return the measurements for one line of the log. Recall is measured up to 1.5 times the longest row."""
        longest = max(stage_at(self.progress).lengths)
        recall = {str(d): round(self.recall(d), 3) for d in PROBE_DISTANCES if d < longest * 1.5}
        return {
            "step": self.state.step,
            "tokens": self.state.tokens,
            "minutes": round(self.state.elapsed_s / 60, 1),
            "progress": round(self.progress, 3),
            "length": longest,
            "loss": round(self.state.losses["loss"], 4),
            "story_loss": round(self.story_loss(), 4),
            "recall": recall,
            "chat": round(self.chat_recall(), 3),
        }

    def save(self) -> None:
        """Write checkpoint.pt. If the write is interrupted, the earlier checkpoint is still there."""
        partial = self.plan.out / "checkpoint.pt.partial"
        torch.save(
            {
                "shape": asdict(self.shape),
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "state": asdict(self.state),
            },
            partial,
        )
        partial.replace(self.plan.out / "checkpoint.pt")

    def resume(self) -> None:
        """Load checkpoint.pt."""
        saved = torch.load(self.plan.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.state = State(**saved["state"])


def run(training: Training) -> None:
    """Train to the end. After each `eval_minutes`, measure, write a line to the log, and save a checkpoint."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f} %"),
        TimeRemainingColumn(),
    )
    log = training.plan.out / "training.log"
    next_report_s = training.state.elapsed_s
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("training", total=1.0)
        while training.progress < 1.0:
            started_s = time.monotonic()
            training.step()
            training.state.elapsed_s += time.monotonic() - started_s
            bar.update(task, completed=training.progress, description=f"loss {training.state.losses['loss']:.3f}")
            if training.state.elapsed_s >= next_report_s or training.progress >= 1.0:
                measured_s = time.monotonic()
                line = json.dumps(training.report())
                print(line, flush=True)
                with log.open("a") as file:
                    file.write(line + "\n")
                training.state.elapsed_s += time.monotonic() - measured_s
                training.save()
                next_report_s = training.state.elapsed_s + training.plan.eval_minutes * 60


def parse_plan(arguments: list[str] | None = None) -> tuple[Plan, bool]:
    """Parse the command line. Returns the plan, and whether to resume."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer, checkpoint and log")
    parser.add_argument("--tokens", type=int, default=60_000_000, help="training ends after this number of tokens")
    parser.add_argument("--minutes", type=float, default=100.0, help="training ends after this time")
    parser.add_argument("--eval-minutes", type=float, default=3.0, help="time between two measurements")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--matrix-rate", type=float, default=1.5e-3, help="peak learning rate of Muon")
    parser.add_argument("--vector-rate", type=float, default=1.5e-3, help="peak learning rate of AdamW")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false")
    parser.add_argument("--resume", action="store_true")
    options = vars(parser.parse_args(arguments))
    resume = options.pop("resume")
    return Plan(**options), resume


def main() -> None:
    """Run the command line."""
    plan, resume = parse_plan()
    training = Training(plan)
    if resume:
        training.resume()
    run(training)


if __name__ == "__main__":
    main()
