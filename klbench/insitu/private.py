"""Which folders we obey and write to: those of the server's own user, or of the one its exports name.

A control file decides what we do, so its folder must be nobody else's. In a container the server is often
root and klbench is not: `klbench env` exports its user as `KLBENCH_INSITU_OWNER`, and what is written into
such a folder may be read by others; only its owner and root come as far as that.
"""

import os
import stat
from pathlib import Path

OWNER_VARIABLE = "KLBENCH_INSITU_OWNER"


def check_private(path: Path) -> None:
    """Raises RuntimeError unless `path` is an absolute folder of a permitted owner and of nobody else."""
    status = path.stat()
    named = os.environ.get(OWNER_VARIABLE, "")
    owners = {os.getuid(), int(named) if named.isdigit() else os.getuid()}
    if (
        not path.is_absolute()
        or not stat.S_ISDIR(status.st_mode)
        or status.st_uid not in owners
        or status.st_mode & 0o077
    ):
        raise RuntimeError(
            f"{path} must be an absolute folder of this user or of {OWNER_VARIABLE}, mode 0700; "
            f"it is user {status.st_uid}'s, mode {status.st_mode & 0o777:04o}, and this is user {os.getuid()}"
        )


def file_mode(folder: Path) -> int:
    """The mode for a new file there: readable by the folder's owner also where we are somebody else."""
    return 0o600 if folder.stat().st_uid == os.getuid() else 0o644
