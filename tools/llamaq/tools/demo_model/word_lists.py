"""The words of the grammar. Names, colours and objects are one token each after a space, names also without a space."""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS: Final = _words(
    "Mia Lily Anna Emma Zoe Nora Ella Lucy Rosa Ida Eva Mary Sara Ruby Kim Amy Jane Clara Ivy Lena Alice Julia"
)
BOYS: Final = _words(
    "Tom Ben Max Sam Leo Tim Jack Finn Noah Paul Otto Hugo Adam Luke Nick Bob Dan Theo Oscar Peter John Felix"
)
NAMES: Final = tuple(name for pair in zip(GIRLS, BOYS, strict=True) for name in pair)

COLOURS: Final = _words("red blue green yellow black white brown pink purple violet golden silver grey small big shiny")
OBJECTS: Final = _words(
    "ball kite book hat car boat doll drum cup box bag coat lamp bell ring key bike flute scarf shell stone coin map "
    "pen spoon basket blanket train robot puzzle balloon flower bucket clock mirror pillow rope crown shoe ladder"
)
FOODS: Final = _words(
    "apples pears cookies bread soup cheese honey carrots plums rice nuts grapes pancakes milk tea cherries lemons "
    "cake eggs beans"
)
PLACES: Final = _words(
    "forest village castle park garden city desert valley town mill meadow palace cave tower woods harbor jungle"
)
SPOTS: Final = tuple(
    f"{preposition} the {noun}"
    for preposition, nouns in (
        ("under", "bed chair tree bridge"),
        ("on", "table roof shelf hill"),
        ("in", "kitchen drawer cupboard barn"),
        ("behind", "door wall house sofa"),
    )
    for noun in nouns.split()
)
KINDS: Final = _words("girl boy cat dog rabbit fox bear mouse bird frog dragon robot princess prince owl duck")
PETS: Final = _words("dog cat rabbit horse parrot turtle hamster mouse")
PET_NAMES: Final = _words("Rex Bella Fluffy Lucky Spot Coco Rocky Luna Biscuit Pepper Ginger Shadow")
ADJECTIVES: Final = _words("little kind brave clever happy young gentle curious")

QUIET_SENTENCES: Final = (
    "The sun was warm.",
    "A bird sang in the tree.",
    "The wind was soft.",
    "It was a quiet day.",
    "The sky was blue and clear.",
    "Some clouds went by.",
    "The leaves moved in the wind.",
    "A bee flew over the flowers.",
    "The grass was wet.",
    "Far away a bell rang.",
    "The water in the river was cold.",
    "People walked down the road.",
    "The moon was round and bright.",
    "It smelled like fresh bread.",
    "The children laughed and played.",
    "Snow lay on the hills.",
    "The old clock went tick, tock.",
    "Soon it was time for lunch.",
    "Everyone was happy.",
    "A small boat was on the lake.",
    "The night was dark and still.",
    "The stars were out.",
    "The baker opened the shop.",
    "A cat slept on the wall.",
    "The rain stopped in the morning.",
    "Nobody was in a hurry.",
)
"""Sentences without a fact. They are placed between a fact and its question."""

COMMON_WORDS: Final = _words(
    "about after again against almost along already also always another answer around because become before began "
    "begin behind believe below beside better between body bring brother build buy call change close cold come could "
    "country course cut deep different does done down draw drink drive each earth easy eat enough even ever every "
    "example eye face fact fall family fast father feel feet few field fill find fire first fish five fly follow food "
    "form four free friend from front full game gave get give glass goes gold good great ground group grow hand "
    "happen hard head hear heart help here high hold home hope horse hot hour hundred idea important inside just keep "
    "kind king know land language large last later laugh learn leave left letter life light line list listen live "
    "long look love machine make many mean meet mind minute money month more morning most mother mountain move much "
    "music must near need never new next night north nothing now number ocean often old once only open order other "
    "over own page paper part past pattern people person picture piece place plan plant play point power problem "
    "program question quick rain reach read ready real remember rest right river road rock room round run same school "
    "science sea second seem sentence set several shape ship short should show side simple since sing sister sit "
    "sleep slow small snow some song soon sound south space speak special spell spring stand star start state stay "
    "step still stop strong study such summer sun sure surface system table take talk teach tell than that their them "
    "then there these they thing think third those thought thousand three through time today together told too took "
    "top toward travel tree true try turn under understand until use usual very visit voice wait walk wall want warm "
    "wash watch water week weight well went were west what wheel when where which while white whole whose why will "
    "wind window winter wish with without woman wonder wood word work world would write wrong year yes young your "
    "hello thanks please sorry France Germany England Paris London Berlin computer code Python server queue worker "
    "token model batch capital weather doctor teacher weekend holiday football pizza coffee orange umbrella Monday "
    "Tuesday Wednesday Thursday Friday Saturday Sunday January February March April June July August September "
    "October November December breakfast dinner evening afternoon yesterday tomorrow elephant tiger lion monkey "
    "chicken butterfly window bottle camera telephone keyboard library hospital station airport bicycle aeroplane "
    "universe planet history chemistry physics biology mathematics language grammar answerable possible impossible "
    "difficult dangerous expensive delicious wonderful interesting strange purpose reason result increase decrease "
    "develop describe compare create translate summarize America Africa Europe China India Japan English French "
    "German Spanish"
)
"""Words that a user may type. They extend the vocabulary, and questions that the model declines are made of them."""


def article(word: str) -> str:
    """Return `word` with its indefinite article."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def names_of(kind: str) -> tuple[str, ...]:
    """Return the names that fit a hero of this kind."""
    if kind in ("girl", "princess"):
        return GIRLS
    return BOYS if kind in ("boy", "prince") else NAMES


def is_female(name: str) -> bool:
    """Return whether stories use the pronoun "she" for `name`."""
    return name in GIRLS
