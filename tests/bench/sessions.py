"""Opening and reporting a session of 32 x 512 and of 256 x 4,096 tokens for each of the three helpers.

    $ uv run python -m tests.bench.sessions --write
    | tokens | open | report, Markdown | report, HTML | report, JSON | size on disk |

Whole commands, as a user types them; beside each the ratio to `klbench --version`, which does nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from klbench.core.columns import HELPERS
from klbench.session import events as ev
from klbench.session.columns import save_columns
from tests.bench.measure import benchmark, markdown, publish, quiet, take_turns, where
from tests.tui.recorded import FACTS, VERDICT, Recorder, columns, result, start

SIZES = ((32, 512), (256, 4096))


def make_session(folder: Path, samples: int, new_tokens: int) -> Path:
    """A finished session with three helpers; two of them with divergent requests."""
    recorder: Recorder = start(folder)
    recorder.add(ev.ServerReady(server=FACTS, url="http://127.0.0.1:31234", launch_s=19.5))
    recorder.add(ev.JobStarted(job=1, kind="run", title="run the three helpers"))
    prompts = {"source": "seeded", "count": samples, "sha256": "ab" * 32}
    options = {"max_new_tokens": new_tokens}
    recorder.add(ev.RunStarted(run=1, helpers=list(HELPERS), prompts=prompts, options=options))
    for helper in HELPERS:
        measured = columns(helper, dirty=helper != "match", samples=samples, new=new_tokens)
        save_columns(folder / "runs" / f"1-{helper}.npz", measured)
        place = f"runs/1-{helper}.npz"
        recorder.add(
            ev.HelperEnded(run=1, helper=helper, result=result(measured), columns=place, elapsed_s=4.2)
        )
    recorder.add(ev.RunEnded(run=1, verdict=VERDICT, elapsed_s=17.4))
    recorder.add(ev.RunnerEnded(reason="the user stopped it"))
    return folder


def row_of(place: Path, samples: int, new_tokens: int, rounds: int) -> list[str]:
    session = make_session(place / f"session-{samples}-{new_tokens}", samples, new_tokens)
    size = sum(file.stat().st_size for file in session.rglob("*") if file.is_file())
    klbench = [sys.executable, "-m", "klbench"]
    environment = dict(os.environ) | {"KLBENCH_HOME": str(place)}
    ways = {"nothing": quiet([*klbench, "--version"], env=environment)}
    ways["open"] = quiet([*klbench, "open", str(session)], env=environment)
    for name in ("md", "html", "json"):
        ways[name] = quiet([*klbench, "report", str(session), "--format", name], env=environment)
    taken = take_turns(ways, rounds)
    nothing = taken.pop("nothing")
    shown = [f"{one.wall_s:.2f} s ({one.cpu_s / nothing.cpu_s:.1f}x)" for one in taken.values()]
    return [f"3 x {samples} x {new_tokens:,}", *shown, f"{size / 1e6:.1f} MB"]


def lines(rounds: int) -> list[str]:
    head = ["tokens", "open", "report, Markdown", "report, HTML", "report, JSON", "size on disk"]
    with tempfile.TemporaryDirectory(prefix="klbench-bench-") as place:
        rows = [row_of(Path(place), samples, new_tokens, rounds) for samples, new_tokens in SIZES]
    return [where(), "", *markdown(head, rows)]


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    publish("bench-sessions", lines(given.rounds), write=given.write)


if __name__ == "__main__":
    main()
