"""`klbench env`: the exports to put before one's own launch script, docker run or srun.

    export KLBENCH_INSITU_DIR=/home/a/.local/state/klbench/attach/3f2a9c10
    export KLBENCH_NONCE=3f2a9c10
    export PYTHONPATH=/home/a/.local/state/klbench/attach/3f2a9c10/pythonpath/plugin${PYTHONPATH:+...}

The folder is the control folder of that server; klbench finds the server by it.
"""

from __future__ import annotations

from klbench.cli import table
from klbench.cli.failures import note, write_json
from klbench.engine.pythonpath import PLUGIN_NAME
from klbench.errors import ExitCode
from klbench.session.attach_exports import make_exports


def print_exports(json_place: str | None) -> int:
    """Makes a control folder for one server and prints what points the server at it."""
    exports = make_exports()
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
    note("put these before the server's launch, then: klbench run --url http://HOST:PORT")
    return ExitCode.CONSISTENT
