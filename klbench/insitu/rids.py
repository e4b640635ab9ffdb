"""The request ids that klbench gives, and what each part of one means. Standard library only.

    klb-<nonce>-<pass><arm><mark>-<request>      klb-a1b2c3d4-7g+-12

`nonce` is the server's, so that another session's ids are never ours. `pass` counts the executions of arms
on this server, so that an id is used once. `arm` is w (warming), g (generation) or s (scoring). The mark `+`
arms the request: every forward that holds it is captured, with its whole batch. `request` is its index in the
run. All ranks of a server see the same ids, so they agree on what is captured without talking to each other.
"""

import re
from dataclasses import dataclass
from typing import Dict, Optional

ARM_LETTERS: Dict[str, str] = {"warming": "w", "generation": "g", "scoring": "s"}
ARM_NAMES: Dict[str, str] = {letter: name for name, letter in ARM_LETTERS.items()}

_PATTERN = re.compile(r"klb-([0-9A-Za-z]{1,64})-([0-9]{1,9})([wgs])(\+?)-([0-9]{1,9})")


@dataclass(frozen=True)
class RequestId:
    """One request id of klbench; `str()` of it is what the server gets."""

    nonce: str
    number: int
    """The pass."""
    arm: str
    """"warming", "generation" or "scoring"."""
    armed: bool
    request: int

    def __str__(self) -> str:
        mark = "+" if self.armed else ""
        return f"klb-{self.nonce}-{self.number}{ARM_LETTERS[self.arm]}{mark}-{self.request}"


def parse_rid(rid: object, nonce: str) -> Optional[RequestId]:
    """The parts of `rid`, or None where it is not an id that klbench gave on this server."""
    if not isinstance(rid, str):
        return None
    found = _PATTERN.fullmatch(rid)
    if found is None or found.group(1) != nonce:
        return None
    return RequestId(
        nonce=nonce,
        number=int(found.group(2)),
        arm=ARM_NAMES[found.group(3)],
        armed=bool(found.group(4)),
        request=int(found.group(5)),
    )
