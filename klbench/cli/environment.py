"""`klbench env`: the exports to put before one's own launch script, docker run or srun.

    export KLBENCH_INSITU_DIR=/home/a/.local/state/klbench/attach/3f2a9c10
    export KLBENCH_NONCE=3f2a9c10
    export PYTHONPATH=/home/a/.local/state/klbench/attach/3f2a9c10/pythonpath/plugin${PYTHONPATH:+...}

The folder is the control folder of that server; klbench finds the server by it. In a container it may have
another path: `klbench env --path-map /klb=/home/a/.local/state/klbench` prints the server's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from klbench.cli import table
from klbench.cli.failures import note, write_json
from klbench.engine.path_map import read_path_map
from klbench.engine.pythonpath import PLUGIN_NAME
from klbench.errors import ExitCode
from klbench.session.attach_exports import make_exports


def print_exports(json_place: str | None, path_maps: Sequence[str] = ()) -> int:
    """Makes a control folder for one server and prints what points the server at it, by its own paths."""
    exports = make_exports(read_path_map(path_maps))
    if json_place is not None:
        content = {
            "environment": exports.environment,
            "pythonpath": exports.pythonpath,
            "plugin": PLUGIN_NAME,
        }
        write_json(json_place, content)
    if json_place != "-":
        for line in exports.lines:
            table.out(line)
    maps = "".join(f" --path-map {shlex.quote(pair)}" for pair in path_maps)
    note("put these before the server's launch, with CUDA graphs off for capture, then:")
    note(f"klbench locate --url http://HOST:PORT{maps}")
    return ExitCode.CONSISTENT
