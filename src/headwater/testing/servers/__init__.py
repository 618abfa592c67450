"""Servers: real services that Headwater is tested with and measured beside, started on loopback in temporary folders."""

from __future__ import annotations


class ServerError(RuntimeError):
    """A server could not be fetched, started or kept alive.

    `code` is stable and one of `java_missing`, `maven_missing`, `download_failed`, `port_in_use`,
    `format_failed`, `died`, `not_ready`; the text says what to do next.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
