"""What a capture needs of a server that was started with sglang's own dumper instead of our plugin."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from klbench.engine.attached import is_this_machine
from klbench.engine.capture_control import RequestIds
from klbench.engine.captured_work import ServerSide
from klbench.engine.dump_process import DumpProcess, DumpReaders
from klbench.engine.dumper_control import find_dumper, layer_windows, own_address
from klbench.engine.facts import read_model_config
from klbench.engine.pythonpath import make_server_path, plugin_environment
from klbench.engine.server import Server
from klbench.engine.server_python import find_server_python
from klbench.errors import UndecidedError
from klbench.session import events as ev
from klbench.session.runner import Session


async def dumper_side(
    session: Session, server: Server, ids: RequestIds, kept: Callable[[DumpProcess], DumpReaders]
) -> ServerSide | None:
    """The server's side where its own dumper has a route, else None; `kept` keeps the reader of its files.

    Raises UndecidedError where it has one that cannot be used. Says what that route means for the machine.
    """
    if server.facts.cuda_graphs is not False:
        return None
    if (server.facts.dp_size or 1) > 1:
        raise UndecidedError(
            "the dumper of a data-parallel server cannot be used",
            why="its replicas write files of the same names",
            next="start it with what klbench env prints, or with --dp-size 1",
        )
    if is_this_machine(server.url) and own_address() is None:
        raise UndecidedError(
            "sglang's dumper would hang on this machine",
            why="it talks to its ranks through the machine's own address, and there is none: no route leads "
            "out and the host's name is 127.0.0.1",
            next="give the host another address (127.0.0.2 in /etc/hosts), or start the server with what "
            "klbench env prints",
        )
    config = read_model_config(server.facts.model, server.paths) or {}
    control = await find_dumper(server.client, ids, server.paths, layer_windows(config))
    if control is None:
        return None
    session.emit(
        ev.Trouble(
            level="warning",
            what="the server's dumper listens on all interfaces of its machine",
            why="each rank opened a port for it that takes pickled commands from anybody who reaches it, as "
            "long as the server runs",
            next="use it on a machine that nobody else reaches, or start the server with what klbench env "
            "prints: that opens none",
        )
    )
    return ServerSide(
        client=server.client,
        control=control,
        ids=ids,
        dumps=kept(await _dump_process(session)),
        model_config=config,
        options=server.arm_options(),
    )


async def _dump_process(session: Session) -> DumpProcess:
    """How to read its dumps: a Python found here that has torch, and our reader beside it."""
    given = session.start.options.server_python
    python = await find_server_python(Path(given) if given else None)
    folder = session.folder.path / "dump-reader"
    environment = plugin_environment(
        folder,
        "none",
        cpu=False,
        fault=None,
        base_env=os.environ,
        server_path=make_server_path(folder, cpu=False),
    )
    return DumpProcess(python.path, environment)
