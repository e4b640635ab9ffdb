"""Opens and closes capture in a server that carries our plugin, and names the requests that are captured.

The other side is klbench/insitu/capture.py: a control file, an acknowledgement of every rank, and a file in
the capture folder that proves that both sides see the same one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from klbench.core.columns import ArmName
from klbench.engine.arms import Rids
from klbench.errors import UndecidedError
from klbench.insitu.rids import RequestId

Backend = Literal["digest", "dumper"]
_CONTROL = "capture-control.json"
_ACK_LIMIT_S = 30.0
_POLL_S = 0.02
_MAX_JSON_BYTES = 1 << 20

_sequence = itertools.count(int(time.time()))


class RequestIds:
    """Gives the ids of one server's passes; a pass is one execution of a helper's arms.

    Each pass needs a number of its own: sglang and the plugin remember requests by their ids.
    """

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.latest_pass = 0

    def next_pass(self, armed: Collection[int] = ()) -> Rids:
        """The ids of the next pass; the requests in `armed` are captured. Its number is `latest_pass`."""
        self.latest_pass += 1
        number, chosen = self.latest_pass, frozenset(armed)

        def rid(arm: ArmName, request: int) -> str:
            return str(RequestId(self.nonce, number, arm, request in chosen, request))

        return rid


def _read(path: Path) -> dict[str, Any] | None:
    """A small JSON object that the server wrote, None while it is not there."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class CaptureControl:
    """The switch of one server's capture. `ranks` are its model processes."""

    def __init__(self, control_dir: Path, nonce: str, ranks: Collection[int]) -> None:
        self.control_dir = control_dir
        self.nonce = nonce
        self.ranks = sorted(ranks)

    async def open(
        self,
        folder: Path,
        *,
        free_floor_bytes: int,
        size_cap_bytes: int,
        backend: Backend = "dumper",
        pattern: str | None = None,
    ) -> None:
        """Opens capture into `folder` (ours, mode 0700). Raises UndecidedError where a rank refuses.

        `pattern` is a regular expression: the dumper writes the tensors in whose name it is found.
        """
        for rank in self.ranks:
            (self.control_dir / f"invalid-{rank}.json").unlink(missing_ok=True)
        await self._ask(
            {
                "folder": str(folder),
                "backend": backend,
                "filter": pattern,
                "free_floor_bytes": free_floor_bytes,
                "size_cap_bytes": size_cap_bytes,
            }
        )
        for rank in self.ranks:
            proof = _read(folder / f"ready-{rank}.json") or {}
            if proof.get("nonce") != self.nonce:
                raise UndecidedError(
                    f"the server's rank {rank} does not see {folder}",
                    why="it acknowledged the capture, but what it wrote there is not here",
                    next="choose a folder that both sides share with --trace-dir",
                )

    async def close(self, limit_s: float = _ACK_LIMIT_S) -> None:
        """Closes capture; the hooks go with the server's next forward."""
        await self._ask(None, limit_s)

    async def _ask(self, capture: dict[str, Any] | None, limit_s: float = _ACK_LIMIT_S) -> None:
        seq = next(_sequence)
        path = self.control_dir / _CONTROL
        draft = path.with_name(f".{_CONTROL}.draft")
        draft.write_text(json.dumps({"seq": seq, "nonce": self.nonce, "capture": capture}), encoding="utf-8")
        os.replace(draft, path)
        deadline = time.monotonic() + limit_s
        for rank in self.ranks:
            while True:
                answer = _read(self.control_dir / f"capture-ack-{rank}.json")
                if answer and answer.get("seq") == seq and answer.get("nonce") == self.nonce:
                    break
                if time.monotonic() > deadline:
                    raise UndecidedError(
                        f"rank {rank} of the server does not answer about captures",
                        why=f"no acknowledgement within {limit_s:.0f} s in {self.control_dir}",
                        next="restart the server with --ready-to-capture",
                    )
                await asyncio.sleep(_POLL_S)
            if answer.get("ok") is not True:
                raise UndecidedError(
                    f"rank {rank} of the server cannot capture", why=str(answer.get("error"))[:2000]
                )

    def invalid(self, folder: Path) -> str | None:
        """Why the capture in `folder` must not be used, in the server's own words; None where it may."""
        # A full disk may have kept the report out of the capture folder.
        for rank, place in itertools.product(self.ranks, (folder, self.control_dir)):
            content = _read(place / f"invalid-{rank}.json")
            if content is not None:
                return f"rank {rank}: {str(content.get('what', 'its report cannot be read'))[:2000]}"
        return None
