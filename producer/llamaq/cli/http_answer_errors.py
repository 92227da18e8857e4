"""The errors of `--server`, and the exit codes that they end a command with."""

from __future__ import annotations

from http import HTTPStatus

from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_NO_ANSWER, EXIT_USAGE
from llamaq.common.errors import LlamaqError

_TEMPORARY = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


class ServerUnreachable(LlamaqError):
    """The HTTP server does not answer, or closes the connection before the end."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class ServerRefused(LlamaqError):
    """The HTTP server refuses a request.

    Attributes:
        http_status: The status of its answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = HTTPStatus(status) if status in set(HTTPStatus) else HTTPStatus.BAD_GATEWAY

    @property
    def exit_code(self) -> int:
        """The exit code of a command that this error ended."""
        if self.http_status in _TEMPORARY:
            return EXIT_NO_ANSWER
        return EXIT_USAGE if self.http_status < HTTPStatus.INTERNAL_SERVER_ERROR else EXIT_FAILED
