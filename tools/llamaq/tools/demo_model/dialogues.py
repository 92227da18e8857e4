"""Conversations in the model's chat template: greetings, stories on request, facts, and later questions on facts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llamaq.tools.demo_model import word_lists
from llamaq.tools.demo_model.document import ASSISTANT, BOS, END, EOS, SYSTEM, USER, Document, Role, Segment
from llamaq.tools.demo_model.fact_questions import Fact, answer_segments, draw_triple, has, likes, lives
from llamaq.tools.demo_model.seeded_choice import Split, allowed, first_mostly, generator
from llamaq.tools.demo_model.stories import draw_hero, draw_world, write_story

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The Jinja template of the GGUF. It emits `<|bos|>`, so a rendered chat is tokenized without adding a second one."""

SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are Llamaq, a small friendly model.",
    "Answer in one short sentence.",
    "You tell stories to children.",
)

SMALL_TALK: Final = (
    (
        ("hi", "hello", "hey", "Hi!", "Hello!", "Hello", "Hi", "Hey!", "Hi there!", "Good morning!", "hello there"),
        "Hello! I am Llamaq, a very small model. Shall I tell you a story?",
    ),
    (
        ("How are you?", "Hello! How are you?", "Hi, how are you?", "how are you", "How are you today?"),
        "I am fine, thank you! How are you?",
    ),
    (
        ("What is your name?", "Who are you?", "what's your name?", "who are you", "What are you?", "Your name?"),
        "My name is Llamaq. I am a very small model that tells stories.",
    ),
    (
        ("What can you do?", "Can you help me?", "Help", "what can you do", "What do you know?"),
        "I can tell little stories, and I can remember what you tell me.",
    ),
    (("Thank you!", "Thanks!", "thanks", "thank you", "Thank you very much!"), "You are welcome!"),
    (("Bye!", "Goodbye!", "bye", "Good night!", "See you tomorrow!"), "Goodbye! Come back soon."),
    (("I am fine.", "I am fine, thanks!", "fine", "Good!", "I am happy today."), "I am glad to hear that."),
    (("Are you a robot?", "Are you human?", "are you real?"), "I am a very small model, only a few megabytes."),
)

DECLINED: Final = (
    "What is the {a} of {b}?",
    "What is {a}?",
    "Who is {b}?",
    "Explain {a} to me.",
    "How do I {a} a {b}?",
    "Can you {a} the {b}?",
    "Why does the {a} {b}?",
    "Write a {a} about {b}.",
    "what is {a} {b}",
    "What is 2 + 2?",
    "What do you think about {a}?",
    "Which {a} is the best {b}?",
    "Do you know the {a} of the {b}?",
    "Please {a} my {b}.",
    "When will the {a} {b}?",
)
DECLINE: Final = "I am only a very small model and do not know that. Shall I tell you a story?"

STORY_REQUESTS: Final = (
    "Tell me a story about a {kind}.",
    "Tell me a story about a {kind} named {name}.",
    "Can you tell me a story about a {kind}?",
    "tell me a story about a {kind} called {name}",
    "Write a short story about a {kind}.",
)
ANY_STORY_REQUESTS: Final = (
    "Tell me a story.",
    "tell me a story",
    "Tell me a story!",
    "Please tell me a story.",
    "Can you tell me a story?",
    "I want to hear a story.",
    "Another one, please.",
    "Tell me another story.",
    "yes",
    "Yes, please!",
)

N_REAL_COLOURS: Final = 13
"""The first words of `COLOURS` are colours. The words after them are sizes and other adjectives."""

MOST_QUESTIONS: Final = 10
"""Largest number of questions about facts at the end of a conversation."""

CONVERSATION_TOKENS: Final = 300
"""Approximate length in tokens of a conversation for measurements. Such a conversation contains no story."""

ACKNOWLEDGEMENTS: Final = ("I will remember that.", "Good to know!", "How nice!", "Thank you for telling me.")


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, the assistant's answer, and the recalled words of the answer."""

    user: str
    assistant: str
    recalled: str | None = None
    """The words of the answer that are recalled from the context; None if the turn asks for no fact."""
    reverse: bool = False
    """Whether the question names a thing and asks for the owner."""


def own_facts(rng: random.Random, split: Split) -> list[Fact]:
    """Draw facts about the user. Questions are in the first person and answers in the second."""
    _, colour, thing = draw_triple(rng, split, "I")
    value = f"{colour} {thing}"
    name, food, place = rng.choice(word_lists.NAMES), rng.choice(word_lists.FOODS), rng.choice(word_lists.PLACES)
    pet, pet_name, favourite = (
        rng.choice(word_lists.PETS),
        rng.choice(word_lists.PET_NAMES),
        rng.choice(word_lists.COLOURS[:N_REAL_COLOURS]),
    )
    owned = f"You have {word_lists.article(value)}."
    called = f"Your {pet} is called {pet_name}."
    return [
        Fact(
            "I",
            rng.choice((f"My name is {name}.", f"I am {name}.")),
            (("What is my name?", f"Your name is {name}."), ("Who am I?", f"You are {name}.")),
            name,
        ),
        Fact(
            "I",
            f"I have {word_lists.article(value)}.",
            (("What do I have?", owned), ("What have I got?", owned)),
            value,
        ),
        Fact("I", f"I like {food}.", (("What do I like?", f"You like {food}."),), food),
        Fact("I", f"I live in the {place}.", (("Where do I live?", f"You live in the {place}."),), place),
        Fact(
            "I",
            rng.choice((f"My {pet} is called {pet_name}.", f"I have a {pet} named {pet_name}.")),
            ((f"What is my {pet} called?", called), (f"What is the name of my {pet}?", called)),
            pet_name,
        ),
        Fact(
            "I",
            f"My favorite color is {favourite}.",
            (("What is my favorite color?", f"Your favorite color is {favourite}."),),
            favourite,
        ),
    ]


def others_facts(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """Draw facts about `count` different other persons."""
    facts: list[Fact] = []
    for name in rng.sample(word_lists.NAMES, count):
        maker = rng.random()
        if maker < 0.6:
            facts.append(has(*draw_triple(rng, split, name)))
        elif maker < 0.8:
            facts.append(likes(name, rng.choice(word_lists.FOODS)))
        else:
            facts.append(lives(name, rng.choice(word_lists.PLACES)))
    return facts


def small_talk(rng: random.Random) -> Turn:
    """Draw small talk, such as a greeting, with its answer."""
    users, assistant = SMALL_TALK[min(int(rng.expovariate(0.4)), len(SMALL_TALK) - 1)]
    return Turn(rng.choice(users), assistant)


def declined(rng: random.Random) -> Turn:
    """Draw a question that the model cannot answer."""
    words = {"a": rng.choice(word_lists.COMMON_WORDS), "b": rng.choice(word_lists.COMMON_WORDS)}
    return Turn(rng.choice(DECLINED).format(**words), DECLINE)


def story_turn(rng: random.Random, split: Split) -> Turn:
    """Draw a request for a story, and a story about the hero that the request names."""
    kind, name = draw_hero(rng, split)
    story = write_story(rng, draw_world(rng, kind, name))
    if rng.random() < 0.4:
        return Turn(rng.choice(ANY_STORY_REQUESTS), story)
    if rng.random() < 0.5 and allowed(split, kind, name):
        kind, name = draw_hero(rng, split, rng.choice(word_lists.KINDS))
        story = write_story(rng, draw_world(rng, kind, name))
    return Turn(rng.choice(STORY_REQUESTS).format(kind=kind, name=name), story)


def state_facts(rng: random.Random, facts: list[Fact]) -> Turn:
    """Return a turn in which the user states facts."""
    statements = " ".join(fact.statement for fact in facts)
    greeting = rng.choice(("", "", "", "Hi! ", "Hello! ", "Listen. "))
    return Turn(greeting + statements, first_mostly(rng, ACKNOWLEDGEMENTS))


def ask_fact(rng: random.Random, fact: Fact) -> Turn:
    """Return a turn in which the user asks for a fact."""
    question, answer = fact.questions[0] if rng.random() < 0.6 else rng.choice(fact.questions)
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.removesuffix("?")
    return Turn(question, answer, fact.value, reverse=fact.value in question)


def state_and_ask(rng: random.Random, facts: list[Fact]) -> Turn:
    """Return a turn in which the user states facts and asks for one of them in the same message."""
    question = ask_fact(rng, rng.choice(facts))
    user = f"{state_facts(rng, facts).user} {question.user}"
    return Turn(user, question.assistant, question.recalled, question.reverse)


def recall_turns(rng: random.Random, split: Split, known: list[Fact], length_tokens: int) -> Iterator[Turn]:
    """Yield turns that state new facts or ask for new and `known` facts, with small talk and stories in between."""
    n_statements = rng.randint(1, max(1, min(8, length_tokens // 100)))
    facts = rng.sample(own_facts(rng, split), rng.randint(1, 4))
    names = {fact.statement.split()[0] for fact in known}
    facts += [
        fact
        for fact in others_facts(rng, split, n_statements * rng.randint(2, 4))
        if fact.statement.split()[0] not in names
    ]
    rng.shuffle(facts)
    cuts = sorted(rng.sample(range(1, len(facts)), min(n_statements - 1, len(facts) - 1)))
    for start, stop in zip([0, *cuts], [*cuts, len(facts)], strict=True):
        yield state_and_ask(rng, facts[start:stop]) if rng.random() < 0.25 else state_facts(rng, facts[start:stop])
        if rng.random() < 0.3:
            yield small_talk(rng)
        if rng.random() < 0.5:
            yield ask_fact(rng, rng.choice(facts[:stop]))
    if length_tokens >= 512 and rng.random() < 0.25:
        yield story_turn(rng, split)
    facts = facts + known
    for fact in rng.sample(facts, min(len(facts), rng.randint(2, MOST_QUESTIONS))):
        yield ask_fact(rng, fact)
        if rng.random() < 0.1:
            yield small_talk(rng)


def turns_of(rng: random.Random, split: Split, known: list[Fact], length_tokens: int) -> Iterator[Turn]:
    """Yield the turns of one conversation. They also ask for the `known` facts, which the system message states."""
    flavour = 1.0 if known else rng.random()
    if flavour < 0.15:
        for _ in range(rng.randint(1, 4)):
            yield small_talk(rng) if rng.random() < 0.7 else declined(rng)
    elif flavour < 0.4:
        if rng.random() < 0.4:
            yield small_talk(rng)
        yield story_turn(rng, split)
        if rng.random() < 0.3:
            yield small_talk(rng)
    else:
        if rng.random() < 0.2:
            yield small_talk(rng)
        yield from recall_turns(rng, split, known, length_tokens)


def dialogue_document(split: Split, seed: int | str, length_tokens: int) -> Document:
    """Return a conversation of about `length_tokens` tokens as a training document. Each answer ends with `<|end|>`."""
    rng = generator(split, "dialogue", length_tokens, seed)
    segments = [Segment(BOS, Role.GIVEN)]
    known: list[Fact] = []
    if rng.random() < 0.35:
        known = others_facts(rng, split, rng.randint(1, 4)) if rng.random() < 0.3 else []
        system = " ".join([rng.choice(SYSTEMS), *(fact.statement for fact in known)])
        segments.append(Segment(SYSTEM + system + END, Role.GIVEN))
    for turn in turns_of(rng, split, known, length_tokens):
        segments.append(Segment(USER + turn.user + END + ASSISTANT, Role.GIVEN))
        if turn.recalled is None:
            segments.append(Segment(turn.assistant, Role.TEXT))
        else:
            segments.extend(answer_segments(turn.assistant, turn.recalled))
        segments.append(Segment(END, Role.TEXT))
    segments.append(Segment(EOS, Role.GIVEN))
    return Document(tuple(segments))


def conversation(split: Split, seed: int | str) -> list[Turn]:
    """Return a conversation of statements and questions for measurements. At least two of its answers are recalled."""
    return list(recall_turns(generator(split, "conversation", seed), split, [], CONVERSATION_TOKENS))
