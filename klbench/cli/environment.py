"""`klbench env`: the exports to put before one's own launch script, docker run or srun.

    export KLBENCH_INSITU_DIR=/home/a/.local/state/klbench/attach/3f2a9c10
    export KLBENCH_NONCE=3f2a9c10
    export PYTHONPATH=/home/a/.local/state/klbench/attach/3f2a9c10/pythonpath/plugin${PYTHONPATH:+...}

The folder is the control folder of that server; klbench finds the server by it.
"""

from __future__ import annotations

import os
import secrets
import shlex

from klbench import paths
from klbench.cli import table
from klbench.cli.failures import note, write_json
from klbench.engine.pythonpath import PLUGIN_NAME, make_server_path
from klbench.errors import ExitCode


def print_exports(json_place: str | None) -> int:
    """Makes a control folder for one server and prints what points the server at it."""
    nonce = secrets.token_hex(4)
    control_dir = paths.make_private(paths.home() / "attach" / nonce)
    folders = [str(folder) for folder in make_server_path(control_dir / "pythonpath", cpu=False)]
    exports = {
        "KLBENCH_INSITU_DIR": str(control_dir),
        "KLBENCH_NONCE": nonce,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if json_place is not None:
        write_json(json_place, {"environment": exports, "pythonpath": folders, "plugin": PLUGIN_NAME})
    if json_place != "-":
        for name, value in exports.items():
            table.out(f"export {name}={shlex.quote(value)}")
        joined = shlex.quote(os.pathsep.join(folders))
        table.out(f"export PYTHONPATH={joined}${{PYTHONPATH:+:$PYTHONPATH}}")
        # sglang reads this as the only plugins to load: where the user set it, ours has to be on it.
        add = f'export SGLANG_PLUGINS="$SGLANG_PLUGINS,{PLUGIN_NAME}"'
        table.out(f'if [ -n "${{SGLANG_PLUGINS:-}}" ]; then {add}; fi')
    note("put these before the server's launch, then: klbench run --url http://HOST:PORT")
    return ExitCode.CONSISTENT
