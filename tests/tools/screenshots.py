"""Draws the screenshots of the README from a recorded session: `uv run python -m tests.tools.screenshots`.

The recording (recording/) is a real session of the demo with a planted fault: what its runner wrote, with
this machine's paths and names replaced. The same recording gives the same bytes.

    --record SESSION    make the recording anew from a finished session's folder
    --out FOLDER        where the SVGs go (default: screenshots/)
"""

import argparse
import asyncio
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

os.environ["TEXTUAL_ANIMATIONS"] = "none"  # read when textual is imported
os.environ.pop("NO_COLOR", None)
os.environ["TZ"] = "UTC"
os.environ["COLORTERM"] = "truecolor"
time.tzset()

from klbench.session.folder import SessionFolder  # noqa: E402
from klbench.session.log import read_log  # noqa: E402
from klbench.session.state import fold  # noqa: E402
from klbench.tui.app import WorkbenchApp  # noqa: E402
from klbench.tui.screens.start import StartScreen  # noqa: E402
from tests.settling import settle  # noqa: E402

ROOT = Path(__file__).parents[2]
RECORDING = Path(__file__).parent / "recording"
NAME = "demo-restore-key"
FONTS = "'Fira Code', 'DejaVu Sans Mono', Menlo, Consolas, monospace"

# name -> (size, keys from the main screen)
SHOTS = {
    "main": ((120, 36), []),
    "wide": ((160, 45), []),
    "tokens": ((120, 36), ["enter", "n", "n"]),
    "all-tokens": ((120, 36), ["t", "slash", *"d>1 helper:prefill", "enter"]),
    "compare": ((120, 36), ["c"]),
    "origin": ((120, 36), ["O"]),
    "verdict": ((120, 36), ["v"]),
    "log": ((120, 36), ["l"]),
    "help": ((120, 36), ["question_mark"]),
    "small": ((80, 24), []),
}


def normalised(svg: str) -> str:
    """The SVG without what differs from run to run, and without fonts to be fetched from elsewhere."""
    svg = re.sub(r"terminal-\d+", "klbench", svg)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code, monospace", f"font-family: {FONTS}", svg)


async def draw(session: Path, size: tuple[int, int], keys: list[str]) -> str:
    """The SVG of what the session shows after some keys."""
    now = fold(read_log(SessionFolder(session).events)).at + 1.0
    app = WorkbenchApp(session=session, readonly=True, clock=lambda: now)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        for key in keys:
            await pilot.press(key)
            await settle(pilot)
        return normalised(app.export_screenshot(title="klbench"))


async def draw_start() -> str:
    """The SVG of the start screen."""
    app = WorkbenchApp(clock=lambda: 0.0)
    app._list_sessions = lambda: None
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await app.workers.wait_for_complete()
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, StartScreen)
        screen.machine = "no CUDA GPU: the demo runs on the CPU · sglang 0.5.23 (klbench's own)"
        screen.show_model()
        for key in ("tab", "down", "down"):
            await pilot.press(key)
            await settle(pilot)
        return normalised(app.export_screenshot(title="klbench"))


def record(session: Path) -> None:
    """Copy what the workbench reads of a session, with paths and names of this machine replaced."""
    shutil.rmtree(RECORDING, ignore_errors=True)
    (RECORDING / "runs").mkdir(parents=True)
    replaced = {str(session): "/home/you/.local/state/klbench/sessions/demo", str(ROOT): "/home/you/klbench",
                str(Path.home()): "/home/you", os.uname().nodename: "box"}  # fmt: skip

    def clean(text: str) -> str:
        for old, new in replaced.items():
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(old)}(?![A-Za-z0-9])", new, text)
        return text

    for name in ("session.json", "events.jsonl"):
        (RECORDING / name).write_text(clean((session / name).read_text(encoding="utf-8")), encoding="utf-8")
    for file in (session / "runs").iterdir():
        shutil.copy(file, RECORDING / "runs" / file.name)
    log = fold(read_log(session / "events.jsonl")).server.log
    if log:
        target = RECORDING / log
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            clean((session / log).read_text(encoding="utf-8", errors="replace")), encoding="utf-8"
        )


def draw_into(out: Path, names: Collection[str] = (*SHOTS, "start")) -> None:
    """Draws the screens of these names into the folder, each in surroundings that are new and the same."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["KLBENCH_HOME"] = folder
            os.environ["HOME"] = folder  # its session is then ~/NAME
            session = Path(folder) / NAME
            shutil.copytree(RECORDING, session)
            drawing = draw_start() if name == "start" else draw(session, *SHOTS[name])
            (out / f"{name}.svg").write_text(asyncio.run(drawing), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="SESSION")
    parser.add_argument("--out", type=Path, default=ROOT / "screenshots")
    options = parser.parse_args()
    if options.record:
        record(options.record.resolve())
    options.out.mkdir(exist_ok=True)
    draw_into(options.out)
    print(f"{len(SHOTS) + 1} screenshots in {options.out}")


if __name__ == "__main__":
    main()
