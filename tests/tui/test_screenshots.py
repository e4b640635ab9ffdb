"""The pictures of the README show the screens as they are: some of them are drawn again and compared."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWN_AGAIN = ("main", "small", "log")
SCRIPT = """
import sys
from pathlib import Path
from tests.tools.screenshots import draw_into
draw_into(Path(sys.argv[1]), sys.argv[2:])
"""


def test_the_screenshots_are_those_of_these_screens(tmp_path):
    # In a process of its own: what Textual reads from the environment, it reads when it is imported.
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *DRAWN_AGAIN]
    subprocess.run(command, check=True, cwd=ROOT)
    for name in DRAWN_AGAIN:
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        kept = (ROOT / "screenshots" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == kept, "uv run python -m tests.tools.screenshots draws them"


def test_there_is_a_picture_of_every_shot_and_none_of_what_is_gone():
    from tests.tools.screenshots import SHOTS

    kept = {file.stem for file in (ROOT / "screenshots").glob("*.svg")}
    assert kept == {*SHOTS, "start"}
