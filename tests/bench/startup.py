"""What a command costs before it does anything: help, a session, a run's first request, a bare Python.

    $ uv run python -m tests.bench.startup --write
    | command | wall | processor | over a bare Python |
    | `klbench --version` | 71 ms | 65 ms | 3.1x |

Budget: `klbench --version` under 150 ms and no import of textual, torch or sglang.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench.measure import benchmark, markdown, publish, quiet, take_turns, where

RECORDING = Path(__file__).parents[1] / "tools" / "recording"
HEAVY = ("textual", "torch", "sglang", "numpy")
BARE = "a bare `python -c pass`"


def lines(rounds: int) -> list[str]:
    """The table, measured now."""
    klbench = [sys.executable, "-m", "klbench"]
    with tempfile.TemporaryDirectory(prefix="klbench-bench-") as place:
        environment = dict(os.environ) | {"KLBENCH_HOME": place}
        ways = {
            BARE: quiet([sys.executable, "-c", "pass"]),
            "`klbench --version`": quiet([*klbench, "--version"], env=environment),
            "`klbench --help`": quiet([*klbench, "--help"], env=environment),
            "`klbench run --help`": quiet([*klbench, "run", "--help"], env=environment),
            "`klbench sessions`": quiet([*klbench, "sessions"], env=environment),
            "`klbench open SESSION`": quiet([*klbench, "open", str(RECORDING)], env=environment),
            "`klbench run --url URL`, until its first request": to_first_request(klbench, environment),
        }
        taken = take_turns(ways, rounds)
    bare = taken[BARE]
    rows = [
        [name, f"{one.wall_s * 1000:.0f} ms", f"{one.cpu_s * 1000:.0f} ms", f"{one.cpu_s / bare.cpu_s:.1f}x"]
        for name, one in taken.items()
    ]
    return [where(), "", *markdown(["command", "wall", "processor", "over a bare Python"], rows)]


def to_first_request(klbench: list[str], environment: dict[str, str]) -> Callable[[], None]:
    """A way that starts a run on a server and ends it as soon as the server hears of it."""

    def way() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(60)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            command = [*klbench, "run", "--url", url, "--yes-flush"]
            nowhere = subprocess.DEVNULL
            with subprocess.Popen(
                command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere
            ) as child:
                try:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(1)
                finally:
                    child.kill()

    return way


def heavy_imports() -> list[str]:
    """Which heavy packages `klbench --version` imports; should be none."""
    program = (
        "import sys\n"
        "from klbench.__main__ import main\n"
        "sys.argv = ['klbench', '--version']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return list(done.stdout.splitlines()[-1:])


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    table = lines(given.rounds)
    heavy = f"heavy packages that `klbench --version` imports: {heavy_imports()[0]}"
    publish("bench-startup", [*table, "", heavy], write=given.write)


if __name__ == "__main__":
    main()
