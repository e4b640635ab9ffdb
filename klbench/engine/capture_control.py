"""Opens and closes capture in a server that carries our plugin, and names the requests that are captured.

The other side is klbench/insitu/capture.py: a control file, an acknowledgement of every rank, and a file in
the capture folder that proves that both sides see the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from klbench.core.columns import ArmName
from klbench.engine.arms import Rids
from klbench.engine.control_file import ControlFile, Wording, read_small_json
from klbench.engine.path_map import SAME_PATHS, PathMap
from klbench.errors import UndecidedError
from klbench.insitu.rids import RequestId

Backend = Literal["digest", "state", "dumper"]


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


NO_SHARED_FOLDER = (
    "choose a folder that both sides share with --trace-dir; where they see it under two paths, say so with "
    "--path-map SERVER=LOCAL"
)

_WORDING = Wording(
    about="captures",
    refused="cannot capture",
    silent_next="restart the server with --ready-to-capture",
)


class CaptureSwitch(Protocol):
    """What opens and closes capture in a server: our plugin, or its own dumper's route."""

    nonce: str
    ranks: list[int]

    @property
    def forwards(self) -> Path | None:
        """The log of which rows shared each forward; None where nobody keeps one."""

    async def open(
        self,
        folder: Path,
        *,
        free_floor_bytes: int,
        size_cap_bytes: int,
        backend: Backend = "dumper",
        pattern: str | None = None,
    ) -> None:
        """Opens capture into `folder`; `pattern` finds the names of the tensors to dump, None for all."""

    async def close(self, limit_s: float | None = None) -> None: ...

    def invalid(self, folder: Path) -> str | None:
        """Why the capture in `folder` must not be used; None where it may."""


class CaptureControl:
    """The switch of our plugin's capture in one server. `ranks` are its model processes.

    `control_dir` and every folder are paths of ours; the server is told what `paths` makes of them.
    """

    def __init__(
        self, control_dir: Path, nonce: str, ranks: Collection[int], paths: PathMap = SAME_PATHS
    ) -> None:
        self.control_dir = control_dir
        self.nonce = nonce
        self.paths = paths
        self.ranks = sorted(ranks)
        self._file = ControlFile(control_dir, nonce, ranks, "capture", _WORDING)

    @property
    def forwards(self) -> Path:
        """The first rank's log of which rows shared each forward."""
        return self.control_dir / f"forwards-{self.ranks[0]}.jsonl"

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
        asked = {
            "backend": backend,
            "filter": pattern,
            "free_floor_bytes": free_floor_bytes,
            "size_cap_bytes": size_cap_bytes,
        }
        await self.ask_in(self._file, folder, asked)

    async def ask_in(self, file: ControlFile, folder: Path, asked: Mapping[str, Any]) -> None:
        """Asks for something that the server will write to `folder`, and proves that both see one folder.

        Raises UndecidedError where a rank refuses, or its nonce cannot be read back.
        """
        named = self.paths.on_server(folder)
        try:
            await file.ask({"folder": named, **asked})
        except UndecidedError as error:
            if "FileNotFoundError" not in error.why:
                raise
            raise UndecidedError(
                f"the server does not see {named}", why=error.why, next=NO_SHARED_FOLDER
            ) from error
        for rank in self.ranks:
            proof = read_small_json(folder / f"ready-{rank}.json") or {}
            if proof.get("nonce") != self.nonce:
                raise UndecidedError(
                    f"the server's rank {rank} does not see {folder}",
                    why=f"it agreed to write to {named}, but what it wrote there is not here",
                    next=NO_SHARED_FOLDER,
                )

    async def close(self, limit_s: float | None = None) -> None:
        """Closes capture; the hooks go with the server's next forward."""
        await self._file.ask(None, limit_s)

    def invalid(self, folder: Path) -> str | None:
        """Why the capture in `folder` must not be used, in the server's own words; None where it may."""
        # A full disk may have kept the report out of the capture folder.
        for rank, place in itertools.product(self.ranks, (folder, self.control_dir)):
            content = read_small_json(place / f"invalid-{rank}.json")
            if content is not None:
                return f"rank {rank}: {str(content.get('what', 'its report cannot be read'))[:2000]}"
        return None
