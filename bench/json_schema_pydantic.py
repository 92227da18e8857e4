"""JSON schemas as pydantic makes them, for `json_schema_coverage.py`: types, fields with constraints, and models."""

from __future__ import annotations

import datetime as dt
import enum
import ipaddress
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    HttpUrl,
    Json,
    NegativeInt,
    NonNegativeFloat,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
    Tag,
    TypeAdapter,
)
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Address(BaseModel):
    """Where a person lives."""

    street: str = Field(max_length=12)
    zip_code: str = Field(pattern=r"^\d{5}$")
    country: Literal["DE", "FR", "US"] = "DE"


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=10)
    age: int = Field(ge=0, le=130)
    email: str | None = None
    address: Address


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    a: int
    b: bool = False


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    a: int


class Team(BaseModel):
    lead: Person
    members: list[Person] = Field(max_length=2)
    by_role: dict[str, Address] = Field(default_factory=dict)


class Tree(BaseModel):
    value: int
    left: Tree | None = None
    right: Tree | None = None


class Comment(BaseModel):
    text: Annotated[str, StringConstraints(max_length=8)]
    replies: list[Comment] = Field(max_length=1)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(le=9, ge=0)


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool


class Add(BaseModel):
    op: Literal["add"] = "add"
    left: Expression
    right: Expression


class Number(BaseModel):
    op: Literal["number"] = "number"
    value: float


Expression = Annotated[Add | Number, Field(discriminator="op")]
Add.model_rebuild()


class Circle(BaseModel):
    shape: Literal["circle"] = "circle"
    radius: float = Field(gt=0)


class Square(BaseModel):
    shape: Literal["square", "rectangle"] = "square"
    side: float = Field(gt=0, lt=100)


class Page(BaseModel, Generic[T]):
    items: list[T] = Field(max_length=2)
    total: int


class Money(BaseModel):
    amount: Decimal = Field(max_digits=6, decimal_places=2)
    currency: Annotated[str, StringConstraints(pattern="^[A-Z]{3}$")]


class Event(BaseModel):
    id: uuid.UUID
    at: dt.datetime
    day: dt.date
    lasts: dt.timedelta
    source: ipaddress.IPv4Address


class Renamed(BaseModel):
    from_: int = Field(alias="from")
    strange: str = Field(alias='a "quoted" key\n', max_length=3)


class Point(NamedTuple):
    x: float
    y: float


class Options(TypedDict):
    verbose: bool
    depth: NotRequired[int]


@dataclass
class Record:
    key: str
    values: tuple[int, ...] = ()


class Names(RootModel[list[str]]):
    root: list[str] = Field(min_length=1, max_length=3)


class Base(BaseModel):
    id: int


class Derived(Base):
    name: Literal["x", "y"]


class ToolCall(BaseModel):
    """A call of a tool, with a description for the model."""

    thought: str = Field(description="Why this tool is called.", max_length=20, examples=["to search"])
    tool: Literal["search", "calculate"]
    arguments: dict[str, str | int | float | bool | None]


class Invoice(BaseModel):
    number: str = Field(pattern=r"^INV-\d{4}-[A-Z]{2}$")
    lines: list[Money] = Field(min_length=1, max_length=2)
    paid: dt.date | None
    status: Color


def _kind_of(value: Any) -> str:
    return "pair" if isinstance(value, dict) else "text"


Tagged = Annotated[
    Annotated[Closed, Tag("pair")] | Annotated[str, Tag("text")],
    Discriminator(_kind_of),
]

TYPES: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "None": None,
    "str": str,
    "bytes": bytes,
    "Any": Any,
    "object": dict[str, Any],
    "Decimal": Decimal,
    "datetime": dt.datetime,
    "date": dt.date,
    "time": dt.time,
    "timedelta": dt.timedelta,
    "UUID": uuid.UUID,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "Path": Path,
    "AnyUrl": AnyUrl,
    "HttpUrl": HttpUrl,
    "SecretStr": SecretStr,
    "Base64Bytes": Base64Bytes,
    "AwareDatetime": AwareDatetime,
    "Json": Json[list[int]],
    "PositiveInt": PositiveInt,
    "NegativeInt": NegativeInt,
    "NonNegativeFloat": NonNegativeFloat,
    "Enum": Color,
    "IntEnum": Level,
    "Literal": Literal["a", 1, True] | None,
    "Optional": int | None,
    "Union": int | str | list[bool],
    "list": list[int],
    "list of lists": list[list[float]],
    "list of lengths": Annotated[list[int], Field(min_length=2, max_length=4)],
    "tuple": tuple[int, str, bool],
    "tuple of any length": tuple[int, ...],
    "empty tuple": tuple[()],
    "set": set[int],
    "frozenset": frozenset[str],
    "Sequence": Sequence[str],
    "dict": dict[str, int],
    "dict of int keys": dict[int, str],
    "dict of enum keys": dict[Color, int],
    "dict of literal keys": dict[Literal["x", "y"], float],
    "dict of pattern keys": dict[Annotated[str, Field(pattern="^[a-z]{1,5}$")], int],
    "dict of UUID keys": dict[uuid.UUID, int],
    "dict of keys with lengths": dict[Annotated[str, Field(min_length=1, max_length=4)], bool],
    "dict of lengths": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
    "dict of two or more": Annotated[dict[str, int], Field(min_length=2)],
    "dict of dicts": dict[str, dict[str, list[int]]],
    "int between": Annotated[int, Field(ge=-5, le=17)],
    "int above": Annotated[int, Field(gt=1000)],
    "int multiple": Annotated[int, Field(multiple_of=7)],
    "int multiple between": Annotated[int, Field(multiple_of=6, ge=10, lt=100)],
    "float between": Annotated[float, Field(ge=0, le=1)],
    "float exclusive": Annotated[float, Field(gt=-0.5, lt=0.5)],
    "float multiple": Annotated[float, Field(multiple_of=0.25)],
    "str lengths": Annotated[str, Field(min_length=3, max_length=6)],
    "str pattern": Annotated[str, Field(pattern=r"^\w+@\w+\.com$")],
    "str pattern unanchored": Annotated[str, Field(pattern=r"\d\d")],
    "str pattern and length": Annotated[str, Field(pattern="^[a-f]+$", min_length=4, max_length=5)],
    "str without case": Annotated[str, Field(pattern="(?i)^yes|no$")],
    "str lookahead": Annotated[str, Field(pattern=r"^[^a]\b")],
    "list of literals": list[Literal["a", "b"]],
    "list of optional": list[int | None],
    "list of unions": list[Cat | Dog],
    "nested optional": dict[str, list[int | None] | None],
    "model": Address,
    "nested model": Person,
    "deep model": Team,
    "forbids extra": Closed,
    "allows extra": Open,
    "recursive model": Tree,
    "recursive list": Comment,
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "discriminated with defaults": Annotated[Circle | Square, Field(discriminator="shape")],
    "recursive discriminated": Expression,
    "list of discriminated": list[Annotated[Cat | Dog, Field(discriminator="kind")]],
    "callable discriminator": Tagged,
    "plain union of models": Cat | Dog | None,
    "generic": Page[int],
    "generic of model": Page[Address],
    "money": Money,
    "formats": Event,
    "aliases": Renamed,
    "NamedTuple": Point,
    "TypedDict": Options,
    "dataclass": Record,
    "RootModel": Names,
    "derived": Derived,
    "tool call": ToolCall,
    "invoice": Invoice,
    "list of models": list[Derived],
    "dict of models": dict[str, Closed],
    "optional model": Closed | None,
    "tuple of models": tuple[Closed, Derived],
    "model or list": Closed | list[Closed],
    "literal of many": Literal[tuple(f"option {n}" for n in range(60))],
    "enum list": list[Level],
    "constrained list of strings": Annotated[list[Annotated[str, Field(max_length=3)]], Field(max_length=3)],
}


def pydantic_schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas by name."""
    return {name: TypeAdapter(kind).json_schema() for name, kind in TYPES.items()}
