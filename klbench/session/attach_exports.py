"""What a server needs in its environment, so that klbench can look inside without launching it."""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from klbench import paths
from klbench.engine.dumper_control import DUMPER_VARIABLES
from klbench.engine.path_map import SAME_PATHS, PathMap
from klbench.engine.pythonpath import PLUGIN_NAME, make_server_path
from klbench.insitu.private import OWNER_VARIABLE


@dataclass(frozen=True, slots=True)
class Exports:
    """`environment` as it is, `pythonpath` to go in front of the server's own."""

    control_dir: Path
    environment: dict[str, str]
    pythonpath: list[str]

    @property
    def lines(self) -> list[str]:
        """Shell lines that set all of it."""
        shown = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        joined = shlex.quote(os.pathsep.join(self.pythonpath))
        shown.append(f"export PYTHONPATH={joined}${{PYTHONPATH:+:$PYTHONPATH}}")
        # sglang reads this as the only plugins to load: where the user set it, ours has to be on it.
        add = f'export SGLANG_PLUGINS="$SGLANG_PLUGINS,{PLUGIN_NAME}"'
        shown.append(f'if [ -n "${{SGLANG_PLUGINS:-}}" ]; then {add}; fi')
        return shown


def how_to_be_captured(asked: str | None, paths_map: PathMap = SAME_PATHS) -> str:
    """What to put before the launch of a server that cannot be captured as it runs: for digests, else the
    dumper; both where none was `asked` for."""
    digests = "; ".join(make_exports(paths_map).lines) if asked != "dumper" else ""
    dumper = "export " + " ".join(f"{name}={value}" for name, value in DUMPER_VARIABLES.items())
    if asked == "digests":
        dumper = ""
    exports = " -- or, for sglang's own dumper, which opens a port on all interfaces: ".join(
        filter(None, (digests, dumper))
    )
    return f"start it with CUDA graphs off (--disable-cuda-graph) and put this before its launch: {exports}"


def attach_root() -> Path:
    """Where the control folders of such servers lie, each named by its nonce."""
    return paths.home() / "attach"


def make_exports(paths_map: PathMap = SAME_PATHS) -> Exports:
    """Makes the control folder of one server to be; the exports name it as the server will see it."""
    nonce = secrets.token_hex(4)
    paths.make_private(paths.home())
    paths.make_private(attach_root())
    control_dir = paths.make_private(attach_root() / nonce)
    folders = [
        paths_map.on_server(folder) for folder in make_server_path(control_dir / "pythonpath", cpu=False)
    ]
    environment = {
        "KLBENCH_INSITU_DIR": paths_map.on_server(control_dir),
        "KLBENCH_NONCE": nonce,
        OWNER_VARIABLE: str(os.getuid()),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    return Exports(control_dir, environment, folders)
