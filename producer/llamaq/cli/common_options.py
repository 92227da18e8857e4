"""Options that many commands have: the Redis server, the queue, the timeout and the output format."""

from __future__ import annotations

from typing import Annotated

import typer

from llamaq.cli.generated_options import setting_help
from llamaq.common.settings import ClientSettings

_FIELDS = ClientSettings.model_fields

RedisUrl = Annotated[str | None, typer.Option(help=setting_help("redis_url", _FIELDS["redis_url"]))]
Queue = Annotated[str | None, typer.Option(help=setting_help("queue", _FIELDS["queue"]))]
WaitForJob = Annotated[
    float | None,
    typer.Option(
        "--wait-s",
        help=setting_help(
            "timeout_s", _FIELDS["timeout_s"], "Longest wait for the result, or for the next piece of text, in seconds."
        ),
    ),
]
WaitForReply = Annotated[
    float | None,
    typer.Option(
        "--wait-s",
        help=setting_help("timeout_s", _FIELDS["timeout_s"], "Longest wait for the worker's reply, in seconds."),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
