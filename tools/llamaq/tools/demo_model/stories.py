"""The seeded grammar of stories: a hero, a world that fits the hero, and the sentences of a plot."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from llamaq.tools.demo_model import word_lists
from llamaq.tools.demo_model.document import BOS, EOS, Document, Role, Segment
from llamaq.tools.demo_model.seeded_choice import (
    PREFERENCE,
    Split,
    allowed,
    first_mostly,
    generator,
    skewed,
    stable_hash,
)
from llamaq.tools.demo_model.story_plots import ENDINGS, HOMES, OPENINGS, PLOTS, Beat

HERO_PREFERENCE: Final = 0.4
"""Probability of the preferred hero. It is lower than `PREFERENCE`, so that every kind and name occurs often."""

OPENING_PREFERENCE: Final = 0.4
"""Probability of the preferred first sentence. It is low because users begin stories in many ways."""

HERO_DRAWS: Final = 2000
"""Number of failed draws after which `draw_hero` raises. If the split allows a hero, about one draw in ten succeeds."""


@dataclass(frozen=True, slots=True)
class World:
    """The characters, places and things of a story. The hero's name or kind makes one option of each more likely."""

    kind: str
    name: str
    adjective: str
    place: str
    colour: str
    thing: str
    friend: str
    friend_kind: str
    spot: str
    food: str
    plot: int


def draw_hero(rng: random.Random, split: Split, kind: str | None = None) -> tuple[str, str]:
    """Draw a kind and a name that fit together and that `split` allows. A given `kind` is not drawn.

    Raises:
        ValueError: No such hero was found.
    """
    for _ in range(HERO_DRAWS):
        drawn_kind = kind or skewed(rng, word_lists.KINDS, "kind", preference=HERO_PREFERENCE)
        name = skewed(rng, word_lists.names_of(drawn_kind), "name", drawn_kind, preference=HERO_PREFERENCE)
        if allowed(split, drawn_kind, name):
            return drawn_kind, name
    raise ValueError(f"no hero for kind={kind} in split {split.value}")


def draw_world(rng: random.Random, kind: str, name: str) -> World:
    """Draw the rest of a story's world. The preferred option of each choice depends on the hero's name or kind."""
    friends = [other for other in word_lists.NAMES if other != name]
    return World(
        kind=kind,
        name=name,
        adjective=skewed(rng, word_lists.ADJECTIVES, "adjective", kind),
        place=skewed(rng, word_lists.PLACES, "place", name),
        colour=skewed(rng, word_lists.COLOURS, "colour", name),
        thing=skewed(rng, word_lists.OBJECTS, "thing", name),
        friend=skewed(rng, friends, "friend", name),
        friend_kind=skewed(rng, word_lists.KINDS[2:12], "friend kind", kind),
        spot=skewed(rng, word_lists.SPOTS, "spot", name),
        food=skewed(rng, word_lists.FOODS, "food", name),
        plot=skewed(rng, range(len(PLOTS)), "plot", kind),
    )


def fields(world: World) -> dict[str, str]:
    """Return the values of the fields in the templates of story_plots.py."""
    he, him, his = ("she", "her", "her") if word_lists.is_female(world.name) else ("he", "him", "his")
    thing = f"{world.colour} {world.thing}"
    return {
        "kind": world.kind,
        "name": world.name,
        "adjective": world.adjective,
        "place": world.place,
        "friend": world.friend,
        "friend_kind": world.friend_kind,
        "spot": world.spot,
        "food": world.food,
        "thing": thing,
        "a_thing": word_lists.article(thing),
        "he": he,
        "him": him,
        "his": his,
        "He": he.capitalize(),
        "His": his.capitalize(),
    }


def write_story(rng: random.Random, world: World) -> str:
    """Return a whole story, from its opening to "The end."."""
    ending = (ENDINGS[stable_hash("ending", world.kind) % len(ENDINGS)],)
    beats: tuple[Beat, ...] = (OPENINGS, HOMES, *PLOTS[world.plot], ending)
    values = fields(world)
    preferences = (OPENING_PREFERENCE, *[PREFERENCE] * (len(beats) - 1))
    sentences = [first_mostly(rng, beat, p) for beat, p in zip(beats, preferences, strict=True)]
    return " ".join(sentences).format(**values)


def draw_story(rng: random.Random, split: Split) -> str:
    """Draw a story about a hero that `split` allows."""
    return write_story(rng, draw_world(rng, *draw_hero(rng, split)))


def story_document(split: Split, seed: int | str) -> Document:
    """Return a story as a training document. It ends with `<|endoftext|>`."""
    text = draw_story(generator(split, "story", seed), split)
    return Document((Segment(BOS, Role.GIVEN), Segment(text + EOS, Role.TEXT)))
