"""Errors that a client or an operator can cause, each one clear line."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be served as sent. Maps onto OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind
        self.retry_after = retry_after  # seconds


class StartupError(Exception):
    """The process cannot start as configured; the message says what to change. Exit code `EXIT_CONFIG`."""


EXIT_CONFIG = 78  # sysexits EX_CONFIG: restarting cannot help, so the launcher does not
