"""Takes out of texts what a report for others must not carry: host and user names, paths, addresses, keys.

Of a path its last name stays, so that files can still be told apart. What a rule cannot know (a secret in
plain words) stays; `--redact` is no substitute for reading before publishing.
"""

from __future__ import annotations

import getpass
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from klbench.session.process_identity import this_host

if TYPE_CHECKING:
    from klbench.session.report import Report
    from klbench.session.state import SessionState

_NAME = r"[^\s/'\"`,;:()\[\]{}<>|=]"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)(--(?:admin-)?api-key|--hf-token|--ssl-keyfile-password)([= ])\S+"), r"\1\2***"),
    (re.compile(r"(?i)\b(authorization:?\s+(?:bearer\s+|basic\s+)?|bearer\s+)\S+"), r"\1***"),
    (re.compile(r"(?i)\b(\w*(?:api_?key|token|secret|password)\w*)=(?!\s)\S+"), r"\1=***"),
    (re.compile(r"\b(?:sk|pk|hf|xoxb|gh[pousr])[-_][A-Za-z0-9_-]{8,}"), "***"),
    (re.compile(r"://[^/\s:@]+(?::[^/\s@]*)?@"), "://***@"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<email>"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}"), "<gpu>"),
    (re.compile(rf"(?<![\w/.~])~?/(?:{_NAME}+/)+({_NAME}*)"), r"<path>/\1"),
    (re.compile(r"(?<=://)(?!127\.0\.0\.1|localhost|\[::1\]|0\.0\.0\.0|\*)[\w.-]+(?=[:/]|$)"), "<host>"),
    (re.compile(r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
)
_SHORTEST_NAME = 3


class Redactor:
    """Redacts with the names of this machine and of the session's own."""

    def __init__(self, names: frozenset[str]) -> None:
        kept = sorted((name for name in names if len(name) >= _SHORTEST_NAME), key=len, reverse=True)
        self._names = (
            re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, kept))})(?![\w-])") if kept else None
        )

    def text(self, value: str) -> str:
        for rule, instead in _RULES:
            value = rule.sub(instead, value)
        return self._names.sub("<name>", value) if self._names is not None else value

    def data(self, value: Any) -> Any:
        """The same JSON-like value with every text redacted, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.data(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(part) for part in value]
        return value

    def report(self, report: Report) -> Report:
        plain = self.data(msgspec.json.decode(msgspec.json.encode(report)))
        return msgspec.convert(plain, type(report))


def redactor_for(state: SessionState) -> Redactor:
    """Knows the hosts and users that this session may name."""
    names = {this_host(), this_host().partition(".")[0], state.runner.host, Path.home().name, _user()}
    # Names that say nothing of anybody.
    return Redactor(frozenset(names - {"", "root", "user", "localhost", "home", "ubuntu"}))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
