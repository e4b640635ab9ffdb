"""Opens and closes the dumper of a server that we did not start, through its own route.

    control = await find_dumper(client, ids, paths, windows)       None where the server has no such route
    await control.open(folder, free_floor_bytes=..., size_cap_bytes=...)

The server was started with `DUMPER_SERVER_PORT=reuse DUMPER_NON_INTRUSIVE_MODE=all`. The dumper's `exp_name`
is sticky and appends, so every capture gets a fresh one; `/dumper/reset` would take its hooks away for good
and is never called. Before anything is captured the server writes the id of a request of one token into a
folder whose name holds the nonce: found here, both sides see one folder. Its files are read by
klbench/insitu/stock_dumps.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klbench.engine.capture_control import NO_SHARED_FOLDER, Backend, RequestIds
from klbench.engine.client import ServerClient
from klbench.engine.path_map import PathMap
from klbench.errors import KlbenchError, UndecidedError

DUMPER_VARIABLES = {
    "DUMPER_ENABLE": "0",
    "DUMPER_SERVER_PORT": "reuse",
    "DUMPER_NON_INTRUSIVE_MODE": "all",
}
"""What such a server is started with."""

_CORE_FIELDS = ["input_ids", "positions", "seq_lens", "req_pool_indices", "rids"]
_SEEN_LIMIT_S = 5.0
_POLL_S = 0.05
_DISK_POLL_S = 0.5


async def find_dumper(
    client: ServerClient, ids: RequestIds, paths: PathMap, windows: Mapping[int, int]
) -> DumperControl | None:
    """The switch of the server's own dumper, None where it has no such route.

    `windows` are the tokens that sliding-window layers reach back. Raises UndecidedError where the dumper
    would not write what is needed.
    """
    states = await client.dumper("get_state")
    if states is None:
        return None
    configs = [state.get("config") for state in states]
    for config in configs:
        mode = config.get("non_intrusive_mode") if isinstance(config, dict) else None
        if mode != "all":
            raise UndecidedError(
                "the server's dumper does not write the tensors of its modules",
                why=f"its non-intrusive mode is {mode!r}, and hooks are made when the model is loaded",
                next="start the server with DUMPER_NON_INTRUSIVE_MODE=all",
            )
        if isinstance(config, dict) and config.get("enable"):
            raise UndecidedError(
                "the server's dumper is in use",
                why=f"it writes {config.get('exp_name')!r} into {config.get('dir')!r} already; a killed "
                "klbench leaves it like that",
                next=_switch_off(client),
            )
    return DumperControl(client, ids, len(states), paths, windows)


class DumperControl:
    """The switch of one server's own dumper; see CaptureSwitch."""

    def __init__(
        self,
        client: ServerClient,
        ids: RequestIds,
        ranks: int,
        paths: PathMap,
        windows: Mapping[int, int],
    ) -> None:
        self.nonce = ids.nonce
        self.ranks = list(range(ranks))
        self._client = client
        self._ids = ids
        self._paths = paths
        self._windows = dict(windows)
        self._exp_name = ""
        self._watch: asyncio.Task[None] | None = None
        self._cut: str | None = None

    @property
    def forwards(self) -> None:
        """Nobody writes down which rows shared a forward of this server."""
        return

    async def open(
        self,
        folder: Path,
        *,
        free_floor_bytes: int,
        size_cap_bytes: int,
        backend: Backend = "dumper",
        pattern: str | None = None,
    ) -> None:
        """Opens capture into `folder`. Raises UndecidedError where the server's files do not arrive there."""
        if backend != "dumper":
            raise UndecidedError(
                "this server gives no digests",
                why="it was not started with klbench's plugin",
                next="capture with --backend dumper, or start it with what klbench env prints",
            )
        await self._prove_shared(folder)
        expression = None
        if pattern is not None:
            # Names of modules are data in this expression, which the server evaluates.
            expression = f"search({pattern!r}, name) or name in {_CORE_FIELDS!r}"
        self._exp_name = self._fresh_name()
        about = {
            "nonce": self.nonce,
            "exp_names": [self._exp_name],
            "windows": {str(layer): window for layer, window in self._windows.items()},
        }
        (folder / "stock.json").write_text(json.dumps(about), encoding="utf-8")
        self._cut = None
        try:
            await self._enable(folder, self._exp_name, expression)
        except BaseException:
            # A request that was given up may still arrive.
            with contextlib.suppress(KlbenchError):
                await asyncio.shield(self._disable())
            raise
        self._watch = asyncio.create_task(self._watch_disk(folder, free_floor_bytes, size_cap_bytes))

    async def close(self, limit_s: float | None = None) -> None:
        """Switches the dumper off; its hooks stay, as they were."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        try:
            async with asyncio.timeout(limit_s):
                await self._disable()
        except TimeoutError as error:
            raise UndecidedError(
                "the server's dumper was not switched off",
                why=f"it did not answer within {limit_s:.0f} s" if limit_s is not None else "",
                next=_switch_off(self._client),
            ) from error

    def invalid(self, folder: Path) -> str | None:
        """Why the capture in `folder` must not be used; None where it may."""
        if self._cut is not None:
            return self._cut
        written = folder / self._exp_name
        if not any(written.glob("*.pt")):
            return f"the dumper wrote nothing to {written}"
        return None

    def _fresh_name(self) -> str:
        """A name that the dumper has never had: what it writes under an old one is mixed with the old."""
        return f"klb-{self.nonce}-{self._ids.latest_pass}-{time.time_ns():x}"

    async def _prove_shared(self, folder: Path) -> None:
        rid = self._ids.next_pass()("warming", 0)
        name = self._fresh_name()
        await self._enable(folder, name, "name == 'rids'")
        try:
            await self._client.generate_one_each([rid])
        finally:
            await asyncio.shield(self._disable())
        place = folder / name
        deadline = time.monotonic() + _SEEN_LIMIT_S
        while not any(place.glob("*.pt")):
            if time.monotonic() > deadline:
                raise UndecidedError(
                    f"what the server's dumper writes to {self._paths.on_server(folder)} is not in {folder}",
                    why="a request of one token was dumped there and nothing arrived here; or it ran in a "
                    "CUDA graph, which no hook sees",
                    next=NO_SHARED_FOLDER,
                )
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(shutil.rmtree, place, True)

    async def _enable(self, folder: Path, name: str, expression: str | None) -> None:
        await self._configure(
            enable=True,
            exp_name=name,
            dir=self._paths.on_server(folder),
            filter=expression,
            enable_output_file=True,
            enable_output_console=False,
            enable_value=True,
            enable_grad=False,
            enable_model_value=False,
            enable_model_grad=False,
            cleanup_previous=False,
        )

    async def _disable(self) -> None:
        await self._configure(enable=False)

    async def _configure(self, **settings: Any) -> None:
        if await self._client.dumper("configure", settings) is None:
            raise UndecidedError("the server's dumper has gone", why="its route answers 404 now")

    async def _watch_disk(self, folder: Path, free_floor_bytes: int, size_cap_bytes: int) -> None:
        """Cuts a capture that fills the disk; the server goes on."""
        while True:
            free = shutil.disk_usage(folder).free
            size = await asyncio.to_thread(_size, folder)
            if free < free_floor_bytes:
                self._cut = f"{free} bytes are free, less than the floor of {free_floor_bytes}"
            elif size > size_cap_bytes:
                self._cut = f"{size} bytes written pass the cap of {size_cap_bytes}"
            if self._cut is not None:
                with contextlib.suppress(KlbenchError):
                    await self._disable()
                return
            await asyncio.sleep(_DISK_POLL_S)


def _switch_off(client: ServerClient) -> str:
    return f"""where nobody needs it: curl -X POST {client.url}/dumper/configure -d '{{"enable": false}}'"""


def own_address() -> str | None:
    """The address that sglang's dumper would give its ranks on this machine, None where it finds none and
    waits forever: by the route out, else by the host's name."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent.
        probe.connect(("8.8.8.8", 80))
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if address not in ("", "127.0.0.1", "0.0.0.0"):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect(("2001:4860:4860::8888", 80))
        return str(probe.getsockname()[0])
    return None


def _size(folder: Path) -> int:
    """Bytes of all files; one that goes meanwhile counts nothing."""
    size = 0
    for path in folder.rglob("*.pt"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


def layer_windows(config: Mapping[str, Any]) -> dict[int, int]:
    """Tokens that each sliding-window layer reaches back, as far as the model's config.json says.

    Its window counts the row's own token; sglang's, and ours, the earlier ones alone.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or isinstance(window, bool) or not isinstance(kinds, list):
        return {}
    return {layer: window - 1 for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
