"""A job in a shared batch generates the same tokens as `Llama` of llama-cpp-python, which runs each prompt alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from llamaq.producer import Client
from llamaq.tools.demo_model.fact_questions import recall_probe

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

NOISE = 0.025
"""How much the gap between the two best logits may change with the shape of the batch, in standard deviations of the
logits."""
JOBS_AT_ONCE = 8
MIN_EQUAL_SHARE = 0.9
"""Smallest share of the tokens that must be equal. The others come after a position with two nearly equal logits."""

OPENINGS = (
    "Once upon a time",
    "Once upon a time there was a girl named Mia.",
    "Once upon a time there was a little fox named Finn.",
    "Once upon a time there was a robot named Max. One day",
    "There was a dragon who lived in the tower.",
    "The sun was warm. Anna and Tom went to the river.",
    "Lily had a golden key.",
)
CHATS = (
    ("Hello! How are you?",),
    ("Tell me a story about a dragon named Max.",),
    ("Tell me a story about a robot.",),
    ("Hi! My name is Sam. I have a green boat.", "I will remember that.", "What is my name?"),
    ("My dog is called Rex.", "I will remember that.", "What is my dog called?"),
    ("What is your name?", "My name is Llamaq. I am a very small model that tells stories.", "Thank you!"),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt in the form that both `Llama` and llamaq accept."""

    arguments: dict[str, Any]
    """The argument `prompt` or `messages`."""
    max_tokens: int


def chat(turns: tuple[str, ...]) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}


PROMPTS = (
    *(Prompt({"prompt": text}, 80) for text in OPENINGS),
    *(Prompt({"prompt": recall_probe(seed, 40 + 60 * seed).prompt}, 16) for seed in range(7)),
    *(Prompt(chat(turns), 60) for turns in CHATS),
)


@dataclass
class Reference:
    """Greedy decoding by `Llama`: the best token at each position, and its gap to the second-best token."""

    end_tokens: frozenset[int]
    chosen: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The generated tokens, without the end token."""
        return self.chosen[:-1] if self.chosen[-1] in self.end_tokens else self.chosen

    def record(self, _: object, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Record the logits of one position. This is a logits processor for `Llama` that does not change the logits."""
        second, best = np.partition(logits, -2)[-2:]
        self.chosen.append(int(logits.argmax()))
        self.margins.append(float((best - second) / logits.std()))
        return logits


@pytest.fixture
def llama(demo: ServedQueue) -> Iterator[llama_cpp.Llama]:
    assert demo.settings.model is not None
    opened = llama_cpp.Llama(
        demo.settings.model, n_ctx=demo.settings.n_ctx, n_threads=1, n_threads_batch=1, verbose=False
    )
    yield opened
    opened.close()


def generate_alone(llama: llama_cpp.Llama, prompt: Prompt) -> tuple[Reference, int]:
    """Return the result of `Llama` for a prompt, and the number of prompt tokens."""
    alone = Reference(frozenset(token for token in range(llama.n_vocab()) if is_end(llama, token)))
    complete = llama.create_chat_completion if "messages" in prompt.arguments else llama.create_completion
    answer: Any = complete(
        **prompt.arguments,
        max_tokens=prompt.max_tokens,
        temperature=0.0,
        repeat_penalty=1.0,
        logits_processor=llama_cpp.LogitsProcessorList([alone.record]),
    )
    return alone, answer["usage"]["prompt_tokens"]


def is_end(llama: llama_cpp.Llama, token: int) -> bool:
    return bool(llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(llama.model), token))


def first_difference(left: list[int], right: list[int]) -> int | None:
    pairs = enumerate(zip(left, right, strict=False))
    unequal = (place for place, (one, other) in pairs if one != other)
    return next(unequal, None if len(left) == len(right) else min(len(left), len(right)))


def test_jobs_in_a_shared_batch_generate_the_tokens_of_llama_cpp_python(
    client: Client, demo: ServedQueue, llama: llama_cpp.Llama
) -> None:
    results = []
    with demo.recording() as ticks:
        for start in range(0, len(PROMPTS), JOBS_AT_ONCE):
            jobs = [
                client.submit(**prompt.arguments, max_tokens=prompt.max_tokens, temperature=0)
                for prompt in PROMPTS[start : start + JOBS_AT_ONCE]
            ]
            results += [job.result(timeout=60) for job in jobs]
    assert max(tick["decode_tokens"] for tick in ticks) == demo.settings.n_parallel, "no tick decoded with all slots"

    n_tokens = n_compared = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        alone, n_prompt = generate_alone(llama, prompt)
        assert result.stats.prompt_tokens == n_prompt
        place = first_difference(alone.tokens, list(result.tokens))
        n_tokens += len(alone.tokens)
        n_compared += len(alone.tokens) if place is None else place
        if place is not None:
            assert alone.margins[place] < NOISE, f"{prompt.arguments} differs at token {place}"
    assert len(PROMPTS) == 20
    assert n_tokens > 500
    assert n_compared >= MIN_EQUAL_SHARE * n_tokens
