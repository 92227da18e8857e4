"""The settings of the HTTP server: the settings of a client, the address to listen on, and the limits of requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from llamaq.common.logging_setup import LogFormat
from llamaq.common.protocol.output_params import MAX_GENERATED_TOKENS
from llamaq.common.settings import ENV_PREFIX, ClientSettings, LogFormatSetting, LogLevelSetting, build_settings

_ORIGIN = re.compile(r"\*|localhost|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://[^\s/?#*A-Z]+")
"""Matches what `cors_origins` may contain. A browser sends `null` for a page from a file. It sends small letters, and
no port if it is the usual one."""


class ServeSettings(ClientSettings):
    """The settings of `llamaq serve`. The setting `queue` names the queue of requests without a model."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    http_host: str = Field("127.0.0.1", description="Address to listen on. `0.0.0.0` listens on all IPv4 addresses.")
    http_port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on. 0: any free port.")
    timeout_s: float = Field(
        3600.0,
        gt=0,
        description="Longest time in seconds that a request waits for its answer, or a stream for its next text.",
    )
    wait_for_worker: bool = Field(
        True,
        description="Whether requests for a queue without a live worker wait for a worker. Otherwise they get the "
        "status 503 with `Retry-After`.",
    )
    accept_any_model: bool = Field(
        False,
        description="Whether a request for an unknown model uses the queue of the setting `queue`. Otherwise it gets "
        "the status 404. Programs such as Claude Code request fixed model names, which are not names of queues.",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_GENERATED_TOKENS,
        description="Largest number of tokens of the answers to requests without `max_tokens`. If not set: they end at "
        "the end of the context.",
    )
    ping_s: float = Field(
        15.0,
        gt=0,
        description="Seconds of silence after which a stream sends a comment, so that proxies do not close the "
        "connection. While the job waits, the comment says how many jobs get a slot before it.",
    )
    max_body_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, le=1024 * 1024 * 1024, description="Largest body of a request, in bytes."
    )
    header_timeout_s: float = Field(20.0, gt=0, description="Longest time in seconds to receive the headers.")
    body_timeout_s: float = Field(60.0, gt=0, description="Longest time in seconds to receive the body of a request.")
    shutdown_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that open requests have to finish after SIGTERM. Then they end with an error.",
    )
    response_ttl_s: float = Field(
        24 * 3600.0,
        gt=0,
        le=10**8,
        description="How long Redis stores the answers of `/v1/responses` and of requests with `store` after the end "
        "of their jobs, in seconds.",
    )
    max_file_bytes: int = Field(
        100 * 1024 * 1024, ge=1024, le=1024 * 1024 * 1024, description="Largest file of `/v1/files`, in bytes."
    )
    max_files_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=1024,
        description="Largest size of all files of an API key together, in bytes. Redis stores them compressed. A batch "
        "also writes its output when this bound is reached.",
    )
    file_ttl_s: float = Field(
        7 * 24 * 3600.0,
        ge=3600,
        le=30 * 24 * 3600,
        description="How long Redis stores uploaded files and the output files of batches, in seconds, if the request "
        "does not have `expires_after` or `output_expires_after`.",
    )
    max_batches: int = Field(
        4, ge=0, le=1000, description="Number of batches that this server computes at the same time. 0: none."
    )
    batch_lease_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="Seconds after the death of a server until another server continues its batches.",
    )
    require_key: bool = Field(
        False,
        description="Whether requests need an API key of `llamaq keys add`. `/`, `/health`, `/v1/health` and "
        "`/openapi.json` need none.",
    )
    keys_file: Path | None = Field(
        None,
        description="File with further API keys, which `llamaq keys add --file` has written. It is read again when it "
        "changes. Needs `require_key`.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins whose web pages may call this server, separated by commas, such as "
        "`https://chat.example.org`. `localhost`: all pages on this machine, at any port. `*`: all. Requests of other "
        "pages, except GET, get the status 403.",
    )
    disabled_endpoints: Annotated[tuple[Literal["page", "metrics", "props", "slots"], ...], NoDecode] = Field(
        (),
        description="Endpoints that this server does not offer, separated by commas: `page` (the chat page), "
        "`metrics`, `props` and `slots` (the list of slots, which shows the jobs of all clients, and POST `/slots/N`).",
    )
    log_level: LogLevelSetting = "info"
    log_format: LogFormatSetting = LogFormat.TEXT
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate chain. If set, the server speaks HTTPS. Needs `tls_key`. Both files "
        "are loaded again when they change.",
    )
    tls_key: Path | None = Field(None, description="PEM file with the private key of `tls_cert`.")

    @field_validator("cors_origins", "disabled_endpoints", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin such as https://chat.example.org")
        return origins

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or none")
        if self.keys_file is not None and not self.require_key:
            raise ValueError("keys_file: without require_key, requests need no key: set require_key too")
        return self


def serve_settings(**values: Any) -> ServeSettings:
    """Return the settings of the server.

    Args:
        values: Fields of `ServeSettings`. None stands for "not given".

    Raises:
        InvalidSettings: A value is not valid; the message names it.
    """
    return build_settings(ServeSettings, values)
