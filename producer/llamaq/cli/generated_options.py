"""Command-line options made from data, so that the name, type and text of a setting stand once, in its model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer


def flag(name: str, kind: Any, *, help_text: str | None, panel: str) -> inspect.Parameter:
    """An option `--name` of this type, None when it is not given; a bool has `--no-name` too."""
    spelling = "--" + name.replace("_", "-")
    if kind is bool:
        spelling += "/--no-" + name.replace("_", "-")
    option = typer.Option(spelling, help=help_text, show_default=False, rich_help_panel=panel)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_flags(
    command: Callable[..., None],
    flags: Iterable[inspect.Parameter],
    *,
    into: str,
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Callable[..., None]:
    """The command with these options beside its own parameters; it gets their values, as `read`, in its `into`."""
    own = [param for param in inspect.signature(command, eval_str=True).parameters.values() if param.name != into]

    def run(**values: Any) -> None:
        known = {param.name: values.pop(param.name) for param in own}
        command(**known, **{into: read(values)})

    parameters = [*own, *flags]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {param.name: param.annotation for param in parameters}
    return run
