"""Command-line options generated from the fields of a model, so that names, types and help are written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from llamaq.common.settings import ENV_PREFIX


def setting_help(name: str, field: FieldInfo, description: str | None = None) -> str:
    """Return the help text of a setting: its description, its default, and its environment variable.

    Args:
        name: The name of the setting.
        field: The field of the setting.
        description: Replaces the field's description.
    """
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = "" if default in (None, ()) else f"default {default}; "
    # In parentheses, because rich reads text in square brackets as markup.
    return f"{description or field.description} ({shown}{ENV_PREFIX}{name.upper()})"


def spelling(name: str) -> str:
    """Return the option of a parameter."""
    return "--" + name.replace("_", "-")


def option(name: str, kind: Any, *, help_text: str | None, panel: str) -> inspect.Parameter:
    """Return the parameter of an option `--name`. Its value is None if the option is not given.

    Args:
        name: The name of the parameter, with underscores.
        kind: The type that the option is parsed as. For a bool, the option `--no-name` exists too.
        help_text: The help text.
        panel: The title of the option's section of `--help`.
    """
    flags = spelling(name)
    if kind is bool:
        flags += "/" + spelling(f"no_{name}")
    typer_option = typer.Option(flags, help=help_text, show_default=False, rich_help_panel=panel)
    annotation = Annotated[kind | None, typer_option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_options(
    command: Callable[..., None],
    options: Iterable[inspect.Parameter],
    *,
    into: str,
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Callable[..., None]:
    """Return the command with additional options.

    Args:
        command: The function of the command.
        options: The additional options.
        into: The parameter of `command` that receives a dict from the names of these options to their values.
        read: Converts that dict before the command receives it.
    """
    own = [param for param in inspect.signature(command, eval_str=True).parameters.values() if param.name != into]

    def run(**values: Any) -> None:
        own_values = {param.name: values.pop(param.name) for param in own}
        command(**own_values, **{into: read(values)})

    parameters = [*own, *options]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {param.name: param.annotation for param in parameters}
    return run
