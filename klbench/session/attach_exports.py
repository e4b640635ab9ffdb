"""What a server needs in its environment, so that klbench can look inside without launching it."""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from klbench import paths
from klbench.engine.pythonpath import PLUGIN_NAME, make_server_path


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


def attach_root() -> Path:
    """Where the control folders of such servers lie, each named by its nonce."""
    return paths.home() / "attach"


def make_exports() -> Exports:
    """Makes the control folder of one server to be."""
    nonce = secrets.token_hex(4)
    paths.make_private(paths.home())
    paths.make_private(attach_root())
    control_dir = paths.make_private(attach_root() / nonce)
    folders = [str(folder) for folder in make_server_path(control_dir / "pythonpath", cpu=False)]
    environment = {
        "KLBENCH_INSITU_DIR": str(control_dir),
        "KLBENCH_NONCE": nonce,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    return Exports(control_dir, environment, folders)
