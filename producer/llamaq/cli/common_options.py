"""Options that many commands have: the Redis server, the queue, the timeout, the filter and the output format."""

from __future__ import annotations

from typing import Annotated

import typer

from llamaq.cli.generated_options import setting_help
from llamaq.common.logging_setup import LogFormat
from llamaq.common.settings import ENV_PREFIX, ClientSettings, client_settings
from llamaq.producer import Priority

_FIELDS = ClientSettings.model_fields
MIN_WAIT_S = 0.001
"""Shortest wait of `--wait-s`. The setting itself may be any number above 0."""
MAX_INTERVAL_S = 86400  # a day

RedisUrl = Annotated[str | None, typer.Option(help=setting_help("redis_url", _FIELDS["redis_url"]))]
Queue = Annotated[str | None, typer.Option(help=setting_help("queue", _FIELDS["queue"]))]


def _check_queues(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        client_settings(queue=name)  # raises if it is not a name
    return names


OnlyQueues = Annotated[
    list[str] | None,
    typer.Option("--queue", help="Only this queue; may be given several times. (default: all)", callback=_check_queues),
]
WaitForJob = Annotated[
    float | None,
    typer.Option(
        "--wait-s",
        min=MIN_WAIT_S,
        help=setting_help(
            "timeout_s", _FIELDS["timeout_s"], "Longest wait for the result, or for the next piece of text, in seconds."
        ),
    ),
]
WaitForReply = Annotated[
    float | None,
    typer.Option(
        "--wait-s",
        min=MIN_WAIT_S,
        help=setting_help("timeout_s", _FIELDS["timeout_s"], "Longest wait for the worker's reply, in seconds."),
    ),
]
RequireWorker = Annotated[
    bool | None,
    typer.Option(
        help=setting_help(
            "require_worker", _FIELDS["require_worker"], "If no worker serves the queue, end at once with exit code 4."
        ),
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="URL of an HTTP server such as `llamaq serve`, which answers instead of the queue in Redis. --queue names "
        "the model. --json prints the server's answer.",
        rich_help_panel="HTTP server",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=f"{ENV_PREFIX}API_KEY",
        show_envvar=True,
        help="API key for the HTTP server.",
        rich_help_panel="HTTP server",
    ),
]
OfPriority = Annotated[Priority | None, typer.Option("--priority", help="Only jobs of this priority.")]
OlderThan = Annotated[
    float | None, typer.Option("--older-than-s", min=0, help="Only jobs submitted more than this many seconds ago.")
]
WithMetadata = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata",
        metavar="KEY=VALUE",
        help="Only jobs whose metadata has this key and value. May be given several times.",
    ),
]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only jobs of this tenant.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OfLogFormat = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar=f"{ENV_PREFIX}LOG_FORMAT",
        show_envvar=True,
        help="Form of log messages.",
    ),
]


def read_metadata(pairs: list[str] | None) -> dict[str, str]:
    """Return the values of `--metadata` by their keys."""
    metadata = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise typer.BadParameter(f"--metadata: {pair!r} is not of the form KEY=VALUE")
        metadata[key] = value
    return metadata
