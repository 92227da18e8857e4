"""Facts, distractors, and questions about them: the grammar from which the demo model learns to look things up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from llamaq.tools.demo_model import word_lists
from llamaq.tools.demo_model.document import BOS, EOS, Document, Role, Segment
from llamaq.tools.demo_model.seeded_choice import Split, allowed, generator
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


FACT_TOKENS: Final = 7
QUESTION_TOKENS: Final = 14
STORY_TOKENS: Final = 150
"""About what a fact, a question with its answer, and a story take."""

MOST_ASKED_TOKENS: Final = 600
"""What the questions of a long document take at most."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement, its questions with their answers, and the words that a right answer must hold."""

    subject: str
    """How the statement begins: whom or what it is about."""
    statement: str
    questions: tuple[tuple[str, str], ...]
    """(question, answer) pairs, the plainest first."""
    value: str


def has(name: str, colour: str, thing: str) -> Fact:
    """Somebody has something."""
    value = f"{colour} {thing}"
    answer = f"{name} has {word_lists.article(value)}."
    return Fact(
        name,
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
    return Fact(name, answer, ((f"What does {name} like?", answer), (f"What does {name} like to eat?", answer)), food)


def lives(name: str, place: str) -> Fact:
    """Somebody lives somewhere."""
    answer = f"{name} lives in the {place}."
    return Fact(name, answer, ((f"Where does {name} live?", answer), (f"Where is the home of {name}?", answer)), place)


def lies(thing: str, spot: str) -> Fact:
    """Something lies somewhere."""
    answer = f"The {thing} is {spot}."
    return Fact(
        f"The {thing}", answer, ((f"Where is the {thing}?", answer), (f"Where can I find the {thing}?", answer)), spot
    )


def draw_triple(rng: random.Random, split: Split, name: str) -> tuple[str, str, str]:
    """A fact triple of `name` that `split` allows, else uniform: recall has to come from the context."""
    while True:
        triple = (name, rng.choice(word_lists.COLOURS), rng.choice(word_lists.OBJECTS))
        if allowed(split, *triple):
            return triple


def draw_facts(rng: random.Random, split: Split, count: int, *, one_kind: bool = False) -> list[Fact]:
    """At most `count` facts that do not contradict each other: a name has one of a kind, a thing one place."""
    pools: list[tuple[int, Callable[[str], Fact], list[str]]] = [
        (6, lambda name: has(*draw_triple(rng, split, name)), list(word_lists.NAMES)),
        (2, lambda name: likes(name, rng.choice(word_lists.FOODS)), list(word_lists.NAMES)),
        (2, lambda name: lives(name, rng.choice(word_lists.PLACES)), list(word_lists.NAMES)),
        (2, lambda thing: lies(thing, rng.choice(word_lists.SPOTS)), list(word_lists.OBJECTS)),
    ]
    if one_kind:
        pools = rng.choices(pools, [weight for weight, _, _ in pools])
    for _, _, subjects in pools:
        rng.shuffle(subjects)
    facts: list[Fact] = []
    while len(facts) < count and any(subjects for _, _, subjects in pools):
        weights = [weight if subjects else 0 for weight, _, subjects in pools]
        ((_, make, subjects),) = rng.choices(pools, weights)
        facts.append(make(subjects.pop()))
    return facts


def filler(rng: random.Random, split: Split, spare_tokens: int) -> str:
    """Text between fact and question: mostly a quiet sentence, now and then a short story."""
    if spare_tokens > STORY_TOKENS and rng.random() < 0.06:
        return draw_story(rng, split)
    return rng.choice(word_lists.QUIET_SENTENCES)


def answer_segments(answer: str, value: str) -> Iterator[Segment]:
    """An answer, its looked-up words apart: they weigh most."""
    before, found, after = answer.rpartition(f" {value}")
    if not found:  # another part of the fact was asked for
        yield Segment(answer, Role.ANSWER)
        return
    yield Segment(before, Role.TEXT)
    yield Segment(found, Role.ANSWER)
    yield Segment(after, Role.TEXT)


def ask(rng: random.Random, fact: Fact, frame: Frame) -> Iterator[Segment]:
    """A question about `fact` and its answer."""
    question, answer = fact.questions[0] if rng.random() < 0.6 else rng.choice(fact.questions)
    yield Segment(frame[0] + question + frame[1], Role.GIVEN)
    yield from answer_segments(frame[2] + answer, fact.value)


def restate(fact: Fact) -> Iterator[Segment]:
    """The fact once more, without a question: the densest exercise."""
    yield Segment(" " + fact.subject, Role.GIVEN)
    yield from answer_segments(fact.statement.removeprefix(fact.subject), fact.value)


def recall_document(split: Split, seed: int | str, length_tokens: int) -> Document:
    """Facts with fillers, then questions about them, about `length_tokens` long in all.

    Half of the documents hold facts of one kind only, so that nothing but the subject tells them apart; and facts are
    asked with repetition, so that nothing can be told by elimination.
    """
    rng = generator(split, "recall", length_tokens, seed)
    wanted = max(3, int(length_tokens * rng.choice((0.25, 0.35, 0.5)) / FACT_TOKENS))
    facts = draw_facts(rng, split, wanted, one_kind=rng.random() < 0.5)
    restated = rng.random() < (0.5 if length_tokens <= 64 else 0.2)
    asked_tokens = FACT_TOKENS if restated else QUESTION_TOKENS
    rest_tokens = length_tokens - FACT_TOKENS * len(facts)
    share = 1.0 if length_tokens <= 64 else rng.choice((0.3, 0.6, 0.9))
    questions = max(2, min(int(rest_tokens * share), MOST_ASKED_TOKENS) // asked_tokens)
    sentences = [fact.statement for fact in facts]
    spare_tokens = rest_tokens - questions * asked_tokens
    while spare_tokens > FACT_TOKENS:
        text = filler(rng, split, spare_tokens)
        sentences.insert(rng.randint(0, len(sentences)), text)
        spare_tokens -= len(text.split()) + 2
    segments = [Segment(BOS, Role.GIVEN), Segment(rng.choice((" ", "\n")).join(sentences), Role.GIVEN)]
    frame = rng.choice((*INLINE_FRAMES, *[LINE_FRAME] * 3))
    for fact in rng.choices(facts, k=questions):
        segments.extend(restate(fact) if restated else ask(rng, fact, frame))
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
    """Some facts, the asked one, distractors and quiet sentences, the question.

    From the asked fact to the end it is `distance_words` words. Each word of the grammar is one token, and so is each
    full stop: the distance is in tokens, to within a sentence. The asked fact is as likely anywhere as the others are,
    so that a model which answers with the first fact, or any, fails.
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
        sentence = rest.pop() if is_fact else rng.choice(word_lists.QUIET_SENTENCES)
        between.append(sentence)
        facts_between += is_fact
        words += len(sentence.split()) + 1
    prompt = " ".join([*before, asked.statement, *between]) + frame[0] + question + frame[1]
    return Probe(prompt, frame[2] + answer, asked.value, facts_between)
