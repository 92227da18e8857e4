"""Facts, distractors, and questions about them: the grammar from which the demo model learns to look things up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llamaq.tools.demo_model import lexicon
from llamaq.tools.demo_model.grammar import BOS, EOS, Document, Role, Segment, Split, allowed, generator
from llamaq.tools.demo_model.stories import draw_story

Frame = tuple[str, str, str]

INLINE_FRAMES: Final[tuple[Frame, ...]] = (
    (" ", "", " "),
    ("\nQuestion: ", "\nAnswer:", " "),
    ("\nQ: ", "\nA:", " "),
)
"""What stands before a question and after it, and how the answer begins: here with a space."""

LINE_FRAME: Final[Frame] = ("\n", "\n", "")
"""Question and answer on lines of their own: the name in the answer has no space before it, as in a chat."""

FRAMES: Final = (*INLINE_FRAMES, LINE_FRAME)


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement, its questions with their answers, and the words that a right answer must hold."""

    statement: str
    questions: tuple[tuple[str, str], ...]
    """(question, answer) pairs, the plainest first."""
    value: str


def has(name: str, colour: str, thing: str) -> Fact:
    """Somebody has something."""
    value = f"{colour} {thing}"
    answer = f"{name} has {lexicon.article(value)}."
    return Fact(
        answer,
        (
            (f"What does {name} have?", answer),
            (f"What has {name} got?", answer),
            (f"Who has the {value}?", f"{name} has the {value}."),
            (f"What color is the {thing} of {name}?", f"The {thing} of {name} is {colour}."),
        ),
        value,
    )


def likes(name: str, food: str) -> Fact:
    """Somebody likes something."""
    answer = f"{name} likes {food}."
    return Fact(answer, ((f"What does {name} like?", answer), (f"What does {name} like to eat?", answer)), food)


def lives(name: str, place: str) -> Fact:
    """Somebody lives somewhere."""
    answer = f"{name} lives in the {place}."
    return Fact(answer, ((f"Where does {name} live?", answer), (f"Where is the home of {name}?", answer)), place)


def lies(thing: str, spot: str) -> Fact:
    """Something lies somewhere."""
    answer = f"The {thing} is {spot}."
    return Fact(answer, ((f"Where is the {thing}?", answer), (f"Where can I find the {thing}?", answer)), spot)


def draw_triple(rng: random.Random, split: Split, name: str) -> tuple[str, str, str]:
    """A fact triple of `name` that `split` allows, else uniform: recall has to come from the context."""
    while True:
        triple = (name, rng.choice(lexicon.COLOURS), rng.choice(lexicon.OBJECTS))
        if allowed(split, *triple):
            return triple


def draw_facts(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """`count` facts that do not contradict each other: one of a kind for each name, one place for each thing."""
    pools: list[tuple[int, Callable[[str], Fact], list[str]]] = [
        (6, lambda name: has(*draw_triple(rng, split, name)), list(lexicon.NAMES)),
        (2, lambda name: likes(name, rng.choice(lexicon.FOODS)), list(lexicon.NAMES)),
        (2, lambda name: lives(name, rng.choice(lexicon.PLACES)), list(lexicon.NAMES)),
        (2, lambda thing: lies(thing, rng.choice(lexicon.SPOTS)), list(lexicon.OBJECTS)),
    ]
    for _, _, subjects in pools:
        rng.shuffle(subjects)
    facts: list[Fact] = []
    while len(facts) < count and any(subjects for _, _, subjects in pools):
        weights = [weight if subjects else 0 for weight, _, subjects in pools]
        ((_, make, subjects),) = rng.choices(pools, weights)
        facts.append(make(subjects.pop()))
    return facts


def filler(rng: random.Random, split: Split) -> str:
    """Text between fact and question: mostly a quiet sentence, now and then a short story."""
    if rng.random() < 0.06:
        return draw_story(rng, split)
    return rng.choice(lexicon.QUIET_SENTENCES)


def ask(rng: random.Random, fact: Fact, frame: Frame) -> tuple[Segment, Segment]:
    """A question about `fact` and its answer."""
    question, answer = fact.questions[0] if rng.random() < 0.6 else rng.choice(fact.questions)
    return Segment(frame[0] + question + frame[1], Role.GIVEN), Segment(frame[2] + answer, Role.ANSWER)


def recall_document(split: Split, seed: int | str, length_tokens: int, *, lines: bool = False) -> Document:
    """Facts with fillers, then questions about many of them, about `length_tokens` long in all.

    With `lines`, facts, questions and answers are on lines of their own in many documents.
    """
    rng = generator(split, "recall", length_tokens, seed)
    density = rng.choice((0.4, 0.6, 0.8))
    count = max(2, int(length_tokens * density / 9))
    facts = draw_facts(rng, split, count)
    told_tokens = length_tokens - 10
    question_tokens = min(len(facts) * 28, int(told_tokens * 0.55), 600)
    sentences = [fact.statement for fact in facts]
    used = 9 * len(sentences) + question_tokens
    while used > told_tokens and len(sentences) > 2:
        sentences.pop()
        facts.pop()
        used -= 9
    while used < told_tokens:
        text = filler(rng, split)
        sentences.insert(rng.randint(0, len(sentences)), text)
        used += len(text.split()) + 2
    separator = rng.choice((" ", "\n")) if lines else " "
    segments = [Segment(BOS, Role.GIVEN), Segment(separator.join(sentences), Role.GIVEN)]
    frame = rng.choice((*INLINE_FRAMES, *[LINE_FRAME] * 3) if lines else INLINE_FRAMES)
    for _ in range(max(2, question_tokens // 14)):
        segments.extend(ask(rng, rng.choice(facts), frame))  # with repetition: nothing can be told by elimination
    segments.append(Segment(EOS, Role.TEXT))
    return Document(tuple(segments))


@dataclass(frozen=True, slots=True)
class Probe:
    """A held-out recall prompt with a known answer."""

    prompt: str
    """Ends where the answer begins; without `<|bos|>`."""
    answer: str
    """The whole answer, with the space before it."""
    value: str
    """The words of the answer that had to be looked up."""
    facts_between: int

    @property
    def text(self) -> str:
        """The prompt with `<|bos|>`, for tokenizers that do not add it."""
        return BOS + self.prompt


def recall_probe(seed: int, distance_words: int, frame: Frame = FRAMES[1]) -> Probe:
    """Two to eight facts, the asked one, distractors and quiet sentences, the question: `distance_words` words from fact to end.

    Each word of the grammar is one token, and so is each full stop: the distance is in tokens, to within a sentence.
    """
    rng = generator(Split.HELD_OUT, "probe", distance_words, seed)
    facts = draw_facts(rng, Split.HELD_OUT, 150)
    asked = next(fact for fact in facts if " has " in fact.statement)
    rest = [fact.statement for fact in facts if fact is not asked]
    before = [rest.pop() for _ in range(rng.randint(2, 8))]
    between: list[str] = []
    facts_between = 0
    question, answer = asked.questions[0]
    words = len((frame[0] + question + frame[1]).split()) + 4  # the punctuation of the frame
    while words < distance_words:
        is_fact = bool(rest) and rng.random() < 0.5
        sentence = rest.pop() if is_fact else rng.choice(lexicon.QUIET_SENTENCES)
        between.append(sentence)
        facts_between += is_fact
        words += len(sentence.split()) + 1
    prompt = " ".join([*before, asked.statement, *between]) + frame[0] + question + frame[1]
    return Probe(prompt, frame[2] + answer, asked.value, facts_between)
