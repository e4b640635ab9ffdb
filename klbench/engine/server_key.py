"""A key for a server of ours on a machine that others use too: loopback keeps out machines, not users.

The key lies in a file of mode 0600 that sglang reads with --config, so it is on no command line; klbench's
plugin keeps it out of the server's own log, and klbench writes it nowhere else.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from klbench.errors import UsageError

KEY_VARIABLE = "KLBENCH_SERVER_KEY"
"""always, never, or auto: where other people have processes on this machine."""

_FILE = "launch.yaml"
_FIRST_PERSON = 1000
"""User ids of people begin here; those below belong to the system's services."""
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class ServerKey:
    """The key, the file that holds it, and why there is one."""

    value: str
    file: Path
    why: str

    @property
    def flags(self) -> list[str]:
        return ["--config", str(self.file)]

    @property
    def note(self) -> str:
        return f"{self.why}: the server asks for a key, which is in {self.file}"


def other_people() -> int:
    """How many other people have processes on this machine, as far as it shows them."""
    users = set()
    for process in psutil.process_iter(["uids"]):
        if (ids := process.info["uids"]) is not None:
            users.add(ids.real)
    return len([user for user in users if user >= _FIRST_PERSON and user not in (os.getuid(), _NOBODY)])


def make_key(
    folder: Path, users: Mapping[str, str | None], environment: Mapping[str, str]
) -> ServerKey | None:
    """A new key in `folder` (0700), or None where the user gives one or none is needed.

    `users` are the user's own sglang arguments. Raises UsageError for a setting that is none.
    """
    setting = environment.get(KEY_VARIABLE) or "auto"
    if setting not in ("always", "never", "auto"):
        raise UsageError(f"{KEY_VARIABLE}={setting} is no setting", next="use always, never or auto")
    if setting == "never" or any(name in users for name in ("--api-key", "--admin-api-key", "--config")):
        return None
    others = other_people() if setting == "auto" else 0
    if setting == "auto" and not others:
        return None
    why = f"{KEY_VARIABLE}=always" if setting == "always" else f"{others} other people use this machine"
    key = ServerKey(secrets.token_hex(24), folder / _FILE, why)
    descriptor = os.open(key.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f"api-key: {key.value}\n")
    return key
