"""Control files: what is said while an answer takes long."""

import threading
from pathlib import Path
from typing import Any

import pytest

from klbench.insitu import control

LIMIT_S = 60


def test_work_that_takes_long_says_that_it_goes_on_and_leaves_the_answer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    enough = threading.Event()

    def write(path: Path, content: dict[str, Any]) -> None:
        assert path == tmp_path / "ack.json"
        said.append(content)
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(control, "write_json_atomically", write)
    answer = {"seq": 3, "ok": True}
    with control.still_working(tmp_path / "ack.json", answer, every_s=0.001):
        assert enough.wait(LIMIT_S)
    threads = [thread.name for thread in threading.enumerate()]

    assert said[:3] == [{"seq": 3, "ok": True, "working": count} for count in (1, 2, 3)]
    assert answer == {"seq": 3, "ok": True}
    assert "klbench-still" not in threads


def test_a_disk_that_is_full_meanwhile_is_left_to_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def full(*_: object) -> None:
        tried.set()
        raise OSError("no space")

    monkeypatch.setattr(control, "write_json_atomically", full)
    with control.still_working(tmp_path / "ack.json", {}, every_s=0.001):
        assert tried.wait(LIMIT_S)


def test_short_work_says_nothing(tmp_path: Path) -> None:
    with control.still_working(tmp_path / "ack.json", {"seq": 1}):
        pass
    assert list(tmp_path.iterdir()) == []
