"""The address of a server to attach to, checked before anything is done with it. Standard library only."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from klbench.errors import UsageError


def server_address(url: str) -> SplitResult:
    """The parts of `url`. Raises UsageError where it is no http(s) address with a host and a port."""
    try:
        if not url.isprintable() or " " in url:
            raise ValueError("it holds blanks or control characters")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("it has no http, no host or no port that could be listened on")
    except ValueError as error:
        next_step = "write it like http://127.0.0.1:30000"
        raise UsageError(f"{url!r} is not an address", why=str(error), next=next_step) from error
    return parts
