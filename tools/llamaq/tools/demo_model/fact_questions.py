"""Texts with facts, distractors and questions. The demo model learns from them to recall facts from its context."""

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
"""Text before a question, after it, and before the answer. In each of these frames the answer begins with a space."""

LINE_FRAME: Final[Frame] = ("\n", "\n", "")
"""Question and answer on separate lines: the name in the answer has no space before it, as in a chat."""

FRAMES: Final = (*INLINE_FRAMES, LINE_FRAME)


FACT_TOKENS: Final = 7
"""Approximate length of a fact in tokens."""
QUESTION_TOKENS: Final = 14
"""Approximate length of a question with its answer, in tokens."""
STORY_TOKENS: Final = 150
"""Approximate length of a story in tokens."""

MOST_ASKED_TOKENS: Final = 600
"""Upper bound on the tokens of all questions in a document."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement, questions about it with their answers, and the words that a right answer must contain."""

    subject: str
    """The beginning of the statement."""
    statement: str
    questions: tuple[tuple[str, str], ...]
    """(question, answer) pairs, the plainest first."""
    value: str


def has(name: str, colour: str, thing: str) -> Fact:
    """Return the fact that a person has a thing."""
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
    """Return the fact that a person likes a food."""
    answer = f"{name} likes {food}."
    return Fact(name, answer, ((f"What does {name} like?", answer), (f"What does {name} like to eat?", answer)), food)


def lives(name: str, place: str) -> Fact:
    """Return the fact that a person lives in a place."""
    answer = f"{name} lives in the {place}."
    return Fact(name, answer, ((f"Where does {name} live?", answer), (f"Where is the home of {name}?", answer)), place)


def is_at(thing: str, spot: str) -> Fact:
    """Return the fact that a thing is at a spot."""
    answer = f"The {thing} is {spot}."
    return Fact(
        f"The {thing}", answer, ((f"Where is the {thing}?", answer), (f"Where can I find the {thing}?", answer)), spot
    )


def draw_triple(rng: random.Random, split: Split, name: str) -> tuple[str, str, str]:
    """Draw a fact triple of `name` that `split` allows.

    The draw is uniform, so a model can take the answer only from the context.
    """
    while True:
        triple = (name, rng.choice(word_lists.COLOURS), rng.choice(word_lists.OBJECTS))
        if allowed(split, *triple):
            return triple


def draw_facts(rng: random.Random, split: Split, count: int, *, one_kind: bool = False) -> list[Fact]:
    """Draw at most `count` facts without contradictions.

    A name has at most one fact of each kind, and a thing has at most one spot.
    """
    pools: list[tuple[int, Callable[[str], Fact], list[str]]] = [
        (6, lambda name: has(*draw_triple(rng, split, name)), list(word_lists.NAMES)),
        (2, lambda name: likes(name, rng.choice(word_lists.FOODS)), list(word_lists.NAMES)),
        (2, lambda name: lives(name, rng.choice(word_lists.PLACES)), list(word_lists.NAMES)),
        (2, lambda thing: is_at(thing, rng.choice(word_lists.SPOTS)), list(word_lists.OBJECTS)),
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
    """Draw a text to place between fact and question: usually a sentence without a fact, sometimes a short story."""
    if spare_tokens > STORY_TOKENS and rng.random() < 0.06:
        return draw_story(rng, split)
    return rng.choice(word_lists.QUIET_SENTENCES)


def answer_segments(answer: str, value: str) -> Iterator[Segment]:
    """Split an answer so that the recalled words are a segment with the largest loss weight."""
    before, found, after = answer.rpartition(f" {value}")
    if not found:  # the question asks for another part of the fact
        yield Segment(answer, Role.ANSWER)
        return
    yield Segment(before, Role.TEXT)
    yield Segment(found, Role.ANSWER)
    yield Segment(after, Role.TEXT)


def ask(rng: random.Random, fact: Fact, frame: Frame) -> Iterator[Segment]:
    """Yield a question about `fact` and its answer."""
    question, answer = fact.questions[0] if rng.random() < 0.6 else rng.choice(fact.questions)
    yield Segment(frame[0] + question + frame[1], Role.GIVEN)
    yield from answer_segments(frame[2] + answer, fact.value)


def restate(fact: Fact) -> Iterator[Segment]:
    """Yield the fact again, without a question. This form trains recall with the fewest tokens."""
    yield Segment(" " + fact.subject, Role.GIVEN)
    yield from answer_segments(fact.statement.removeprefix(fact.subject), fact.value)


def recall_document(split: Split, seed: int | str, length_tokens: int) -> Document:
    """Return facts with fillers and then questions about them, with about `length_tokens` tokens in total.

    Half of the documents have facts of one kind only, so that only the subject distinguishes the facts. Questions may
    repeat, so that a model cannot find an answer by excluding the facts that were asked before.
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
    """A prompt about a held-out fact, with a known answer."""

    prompt: str
    """The text up to the answer, without `<|bos|>`."""
    answer: str
    """The whole answer, with the space before it."""
    value: str
    """The words of the answer that are recalled from the context."""
    facts_between: int

    @property
    def text(self) -> str:
        """The prompt with `<|bos|>`, for tokenizers that do not add it."""
        return BOS + self.prompt


def recall_probe(seed: int, distance_words: int, frame: Frame = FRAMES[1]) -> Probe:
    """Return a prompt: first facts, among them the asked fact, then distractors, then the question.

    Distractors are other facts, and sentences without a fact. The asked fact can be anywhere among the first
    facts, so that a model that always answers with the first fact fails.

    Args:
        seed: Equal seeds give equal probes.
        distance_words: Number of words from the asked fact to the end of the prompt. Each word and each full stop is
            one token, so this is also the distance in tokens. Both may be wrong by the length of a sentence.
        frame: Text around the question.
    """
    rng = generator(Split.HELD_OUT, "probe", distance_words, seed)
    facts = draw_facts(rng, Split.HELD_OUT, 150)
    asked = next(fact for fact in facts if " has " in fact.statement)
    rest = [fact.statement for fact in facts if fact is not asked]
    before = [rest.pop() for _ in range(rng.randint(2, 8))]
    between: list[str] = []
    facts_between = 0
    question, answer = asked.questions[0]
    words = len((frame[0] + question + frame[1]).split()) + 4  # four tokens for the punctuation of the frame
    while words < distance_words:
        is_fact = bool(rest) and rng.random() < 0.5
        sentence = rest.pop() if is_fact else rng.choice(word_lists.QUIET_SENTENCES)
        between.append(sentence)
        facts_between += is_fact
        words += len(sentence.split()) + 1
    prompt = " ".join([*before, asked.statement, *between]) + frame[0] + question + frame[1]
    return Probe(prompt, frame[2] + answer, asked.value, facts_between)
