"""Fixtures of the workbench's tests: a private home, a fixed time zone, text snapshots."""

import os
import time
from pathlib import Path

os.environ["TEXTUAL_ANIMATIONS"] = "none"  # read when textual is imported

import pytest
import recorded
from terminals import Terminal

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.fixture(autouse=True)
def _private_surroundings(tmp_path, monkeypatch):
    """No test reads this machine's sessions, clock zone or colours."""
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))  # a session's folder is then ~/NAME on every screen
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()


@pytest.fixture
def finished(tmp_path):
    """A session that was measured, located and ended."""
    return recorded.finished(tmp_path / "20251129-dense")


@pytest.fixture
def measuring(tmp_path):
    """A session in the middle of its second helper."""
    return recorded.measuring(tmp_path / "20251129-dense")


@pytest.fixture
def terminal(tmp_path):
    """Opens the workbench on a session in a pseudo-terminal, and ends it with the test."""
    opened = []

    def open_terminal(session=None, **options):
        session = session or recorded.finished(tmp_path / "20251129-dense")
        opened.append(Terminal(session, **options))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


@pytest.fixture
def snapshot():
    """Compares a screen's text with the file of that name; KLBENCH_UPDATE_SNAPSHOTS=1 writes it."""

    def compare(name: str, text: str) -> None:
        file = SNAPSHOTS / f"{name}.txt"
        if os.environ.get("KLBENCH_UPDATE_SNAPSHOTS"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
        assert file.exists(), f"no snapshot {file.name}: KLBENCH_UPDATE_SNAPSHOTS=1 pytest writes it"
        assert text + "\n" == file.read_text(encoding="utf-8")

    return compare
