"""Measures a GGUF file of the demo model: `python -m llamaq.tools.demo_model.evaluate llamaq-demo.gguf`.

All generations are greedy, in llama.cpp, on the held-out share of the grammar. The output is a table and then one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from llamaq.tools.demo_model.dialogues import conversation
from llamaq.tools.demo_model.fact_questions import FRAMES, recall_probe
from llamaq.tools.demo_model.llama_runner import SEQUENCES, LlamaRunner, Logits
from llamaq.tools.demo_model.seeded_choice import Split, generator
from llamaq.tools.demo_model.stories import draw_hero
from llamaq.tools.demo_model.story_plots import ENDINGS, HOMES, OPENINGS, PLOTS

DISTANCES_TOKENS: Final = (50, 100, 200, 400, 800, 1200, 1500)
ANSWER_TOKENS: Final = 16
STORY_TOKENS: Final = 300
NOISE_TOKENS: Final = 64
CHUNK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Recall:
    """Recall of facts at one distance between the fact and the question."""

    distance_tokens: float
    """Mean number of tokens from the fact's end to the end of the prompt."""
    facts_between: float
    """Mean number of other facts between the fact and the question."""
    right: int
    asked: int

    @property
    def share(self) -> float:
        """Share of right answers."""
        return self.right / self.asked


@dataclass(frozen=True, slots=True)
class Story:
    """A greedy story and its measurements."""

    text: str
    tokens: int
    ended: bool
    """Whether the story ended with an end token, and not at the limit of tokens."""
    understood: float
    """Share of the story's characters that are part of sentences that the grammar can generate."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Answers in conversations of several turns."""

    right: int
    asked: int
    reverse_right: int
    """Right answers to reverse questions, which name a thing and ask for the owner.

    `right` and `asked` do not count reverse questions.
    """
    reverse_asked: int
    turns: float
    """Mean number of the user's turns in a conversation."""
    ended: int
    """Number of answers of any kind that ended with an end token."""
    answers: int

    @property
    def share(self) -> float:
        """Share of recalled answers that are right word for word, without reverse questions."""
        return self.right / self.asked


@dataclass(frozen=True, slots=True)
class Noise:
    """How much the logits of the same tokens change with the shape of the batch."""

    largest_logit_change: float
    largest_gap_change: float
    """Largest change of the gap between the best and the second-best logit."""
    median_gap_change: float
    changed_tokens: int
    """Number of positions at which the best token changes."""
    tokens: int


def measure_recall(runner: LlamaRunner, distance_tokens: int, count: int, frame: int = 1) -> Recall:
    """Ask for `count` held-out facts, each stated about `distance_tokens` before the question.

    An answer is right if every word of it is right.
    """
    right = 0
    distances, between = [], []
    for seed in range(count):
        probe = recall_probe(seed, distance_tokens, FRAMES[frame])
        ids = runner.tokenize(probe.prompt)
        fact_end = probe.prompt.index(probe.answer.strip()) + len(probe.answer.strip())
        distances.append(len(runner.tokenize(probe.prompt[fact_end:], add_bos=False)))
        between.append(probe.facts_between)
        answer, _ = runner.greedy(ids, ANSWER_TOKENS)
        right += runner.text(answer).startswith(probe.answer)
    return Recall(float(np.mean(distances)), float(np.mean(between)), right, count)


def story_patterns() -> list[re.Pattern[str]]:
    """Return one regular expression for each sentence of the story grammar. It matches any values of the fields."""
    beats = [OPENINGS, HOMES, ENDINGS, *(beat for plot in PLOTS for beat in plot)]
    templates = [template for beat in beats for template in beat]
    parts = [re.split(r"\{\w+\}", template) for template in templates]
    return [re.compile(r"\s*" + r"[A-Za-z]+(?: [a-z]+){0,3}?".join(map(re.escape, part))) for part in parts]


def grammar_share(text: str) -> float:
    """Return the share of characters of `text` that sentences of the story grammar cover, in any order."""
    patterns = story_patterns()
    covered = position = 0
    while position < len(text):
        match = max((p.match(text, position) for p in patterns), key=lambda m: m.end() if m else 0)
        if match:
            covered += match.end() - position
            position = match.end()
        else:
            stop = text.find(". ", position)
            position = stop + 1 if stop >= 0 else len(text)
    return covered / max(1, len(text))


def openings(count: int) -> list[str]:
    """Return `count` beginnings of stories with different held-out heroes."""
    rng = generator(Split.HELD_OUT, "openings")
    heroes: dict[tuple[str, str], None] = {}
    while len(heroes) < count:
        heroes[draw_hero(rng, Split.HELD_OUT)] = None
    return [f"Once upon a time there was a {kind} named {name}." for kind, name in heroes]


def measure_stories(runner: LlamaRunner, count: int) -> list[Story]:
    """Generate stories from held-out openings."""
    stories = []
    for prompt in openings(count):
        ids, ended = runner.greedy(runner.tokenize(prompt), STORY_TOKENS)
        text = prompt + runner.text(ids)
        stories.append(Story(text, len(ids), ended, grammar_share(text)))
    return stories


def measure_chat(runner: LlamaRunner, count: int) -> Chat:
    """Send the user's messages of `count` held-out conversations. The model's answers stay in the context."""
    asked, right = Counter[bool](), Counter[bool]()
    answers = ended = 0
    turns = []
    for seed in range(count):
        messages: list[dict[str, str]] = []
        conversation_turns = conversation(Split.HELD_OUT, seed)
        turns.append(len(conversation_turns))
        for turn in conversation_turns:
            messages.append({"role": "user", "content": turn.user})
            ids, finished = runner.greedy(runner.render(messages), STORY_TOKENS)
            answer = runner.text(ids)
            messages.append({"role": "assistant", "content": answer})
            answers += 1
            ended += finished
            asked[turn.reverse] += turn.recalled is not None
            right[turn.reverse] += turn.recalled is not None and answer == turn.assistant
    return Chat(right[False], asked[False], right[True], asked[True], float(np.mean(turns)), ended, answers)


def gap(row: Logits) -> float:
    """Return the difference between the best and the second-best logit."""
    second, best = np.partition(row, -2)[-2:]
    return float(best - second)


def recall_gaps(runner: LlamaRunner, distance_tokens: int, count: int) -> list[float]:
    """Return the gap (see `gap`) at each token of greedy answers to recall probes."""
    gaps: list[float] = []
    for seed in range(count):
        probe = recall_probe(seed, distance_tokens)
        answer_tokens = len(runner.tokenize(probe.answer, add_bos=False))
        runner.greedy(runner.tokenize(probe.prompt), answer_tokens, lambda row: gaps.append(gap(row)))
    return gaps


def story_gaps(runner: LlamaRunner, count: int) -> list[float]:
    """Return the gap (see `gap`) at each token of greedy stories."""
    gaps: list[float] = []
    for prompt in openings(count):
        runner.greedy(runner.tokenize(prompt), STORY_TOKENS, lambda row: gaps.append(gap(row)))
    return gaps


def noise_prompts(runner: LlamaRunner) -> list[list[int]]:
    """Return `SEQUENCES` prompts of different lengths: half of them stories, half questions."""
    half = SEQUENCES // 2
    texts = openings(half) + [recall_probe(seed, 40 + 60 * seed).prompt for seed in range(half)]
    return [runner.tokenize(text) for text in texts]


def decode_alone(runner: LlamaRunner, prompt: Sequence[int], forced: Sequence[int], chunk: int) -> Logits:
    """Return the logits before each of the `forced` tokens. The prompt is decoded in chunks of `chunk` tokens."""
    runner.clear()
    for start in range(0, len(prompt), chunk):
        (row,) = runner.decode([(0, prompt[start : start + chunk])])
    out = [row]
    for token in forced[:-1]:
        (row,) = runner.decode([(0, [token])])
        out.append(row)
    return np.stack(out)


def decode_together(
    runner: LlamaRunner, prompts: Sequence[Sequence[int]], forced: Sequence[Sequence[int]]
) -> list[Logits]:
    """Return the logits before each of the `forced` tokens. All prompts are decoded in one batch."""
    runner.clear()
    steps = [runner.decode(list(enumerate(prompts)))]
    steps += [
        runner.decode([(index, tokens[place : place + 1]) for index, tokens in enumerate(forced)])
        for place in range(NOISE_TOKENS - 1)
    ]
    return [np.stack([step[index] for step in steps]) for index in range(len(prompts))]


def compare(alone: Sequence[Logits], other: Sequence[Logits]) -> Noise:
    """Compare the logits of the same tokens, decoded in two ways."""
    a, b = np.concatenate(alone), np.concatenate(other)
    changes = np.array([abs(gap(x) - gap(y)) for x, y in zip(a, b, strict=True)])
    return Noise(
        float(np.abs(a - b).max()),
        float(changes.max()),
        float(np.median(changes)),
        int((a.argmax(-1) != b.argmax(-1)).sum()),
        len(a),
    )


def measure_noise(runner: LlamaRunner) -> dict[str, Noise]:
    """Decode the same tokens alone, in a batch of `SEQUENCES` sequences, and in chunks.

    End tokens do not stop the decoding.
    """
    prompts = noise_prompts(runner)
    forced, alone = [], []
    for prompt in prompts:
        runner.clear()
        (row,) = runner.decode([(0, prompt)])
        tokens: list[int] = []
        seen: list[Logits] = []
        while len(tokens) < NOISE_TOKENS:
            seen.append(row)
            tokens.append(int(row.argmax()))
            (row,) = runner.decode([(0, [tokens[-1]])])
        forced.append(tokens)
        alone.append(np.stack(seen))
    chunked = [decode_alone(runner, p, f, CHUNK_TOKENS) for p, f in zip(prompts, forced, strict=True)]
    return {
        f"batch of {SEQUENCES}": compare(alone, decode_together(runner, prompts, forced)),
        f"chunks of {CHUNK_TOKENS}": compare(alone, chunked),
    }


def quantiles(gaps: Sequence[float]) -> dict[str, float]:
    """Return minimum, 1st and 5th percentile, and median."""
    values = np.percentile(gaps, [0, 1, 5, 50])
    return dict(zip(("min", "p1", "p5", "median"), (round(float(v), 3) for v in values), strict=True))


def evaluate(path: Path, count: int) -> dict[str, Any]:
    """Return all measurements, with `count` probes for each distance."""
    with LlamaRunner(path) as runner:
        recall = [measure_recall(runner, distance, count) for distance in DISTANCES_TOKENS]
        stories = measure_stories(runner, max(4, count // 5))
        chat = measure_chat(runner, max(4, count // 5))
        return {
            "file_bytes": path.stat().st_size,
            "load_s": round(runner.load_s, 3),
            "context_tokens": runner.training_context,
            "recall": [asdict(row) | {"share": round(row.share, 4)} for row in recall],
            "stories": {
                "count": len(stories),
                "distinct": len({story.text for story in stories}),
                "mean_tokens": float(np.mean([story.tokens for story in stories])),
                "ended": sum(story.ended for story in stories),
                "understood": round(float(np.mean([story.understood for story in stories])), 4),
                "sample": stories[0].text,
            },
            "chat": asdict(chat) | {"share": round(chat.share, 4)},
            "gaps": {
                "recall, 50 tokens back": quantiles(recall_gaps(runner, 50, count)),
                "recall, 200 tokens back": quantiles(recall_gaps(runner, 200, count)),
                "stories": quantiles(story_gaps(runner, max(4, count // 5))),
            },
            "noise": {name: asdict(noise) for name, noise in measure_noise(runner).items()},
            "processors": os.cpu_count(),
        }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table("what", "figure")
    table.add_row("file, loaded in", f"{result['file_bytes'] / 1e6:.2f} MB, {result['load_s'] * 1000:.0f} ms")
    for row in result["recall"]:
        name = f"recall from {row['distance_tokens']:.0f} tokens back, past {row['facts_between']:.0f} facts"
        table.add_row(name, f"{row['share']:.1%} of {row['asked']}")
    stories, chat = result["stories"], result["chat"]
    table.add_row("stories ended, distinct", f"{stories['ended']}, {stories['distinct']} of {stories['count']}")
    table.add_row(
        "stories: mean length, in the grammar", f"{stories['mean_tokens']:.0f} tokens, {stories['understood']:.1%}"
    )
    table.add_row(f"chat, {chat['turns']:.1f} turns: recalled word for word", f"{chat['share']:.1%} of {chat['asked']}")
    table.add_row("chat: whose is it?", f"{chat['reverse_right']} of {chat['reverse_asked']}")
    table.add_row("chat: answers ended", f"{chat['ended']} of {chat['answers']}")
    for name, gaps in result["gaps"].items():
        table.add_row(f"gap of best to second, {name}", ", ".join(f"{key} {value:.2f}" for key, value in gaps.items()))
    for name, noise in result["noise"].items():
        change = f"gap by at most {noise['largest_gap_change']:.4f}, logits by {noise['largest_logit_change']:.4f}"
        table.add_row(f"{name} changes", f"{change}; {noise['changed_tokens']} of {noise['tokens']} tokens")
    console.print(table)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--count", type=int, default=100, help="probes for each distance")
    options = parser.parse_args()
    result = evaluate(options.model, options.count)
    console = Console(width=110)
    show(result, console)
    console.print(result["stories"]["sample"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
