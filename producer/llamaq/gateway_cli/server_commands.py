"""Adds the commands of the HTTP server to the `llamaq` command."""

from __future__ import annotations

import typer

from llamaq.gateway_cli import key_commands, serve_command


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    serve_command.register(app)
    app.add_typer(key_commands.build_app(), name="keys")
