"""The base classes of all messages that travel through Redis."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A message that users write: an unknown field is an error, so that a misspelt parameter is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WireModel(BaseModel):
    """A message that llamaq writes: an unknown field is ignored, because a newer version may have added it."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
