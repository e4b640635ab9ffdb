"""What a command line may not say and where it may not write: refused before the work, nothing replaced."""

import os
import subprocess
import sys

import pytest

from klbench.cli import main
from tests.cli.test_commands import recorded_session


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (option, value)
        for option in ("--threshold", "--launch-timeout", "--keep-idle")
        for value in ("nan", "inf", "-inf", "NaN")
    ],
)
def test_what_is_no_finite_number_is_refused(option, value, capsys):
    assert main(["run", "--demo", f"{option}={value}"]) == 2
    assert option in capsys.readouterr().err


def test_a_folder_that_cannot_hold_captures_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["run", "--demo", "--trace-dir", str(tmp_path / "file" / "traces")]) == 2
    assert "no folder that may be written" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["missing/report.md", ".", "-"])
def test_a_place_where_no_report_can_go_is_refused(tmp_path, monkeypatch, place, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(recorded_session().path), "--format", "md", "--output", place]) == 2
    assert "cannot write" in capsys.readouterr().err or place == "-"


def test_a_report_goes_into_a_pipe_and_never_in_its_place(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    command = [sys.executable, "-m", "klbench", "report", str(recorded_session().path), "--format", "md"]
    with subprocess.Popen([*command, "--output", str(link)], stdout=subprocess.DEVNULL) as process:
        text = pipe.read_text()
    assert process.returncode == 0
    assert text.startswith("#")
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_a_report_through_a_link_changes_the_file_and_keeps_the_link(tmp_path):
    file, link = tmp_path / "report.md", tmp_path / "link.md"
    file.write_text("old")
    link.symlink_to(file)
    assert main(["report", str(recorded_session().path), "--format", "md", "--output", str(link)]) == 0
    assert link.is_symlink()
    assert file.read_text().startswith("#")


def test_variables_are_checked_also_where_there_is_no_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["config", "check"]) == 0
    said = capsys.readouterr().out
    assert "the variables are understood" in said
    assert "mkdir -p" in said
    monkeypatch.setenv("KLBENCH_THRESHOLD", "abc")
    assert main(["config", "check"]) == 2
    assert "KLBENCH_THRESHOLD" in capsys.readouterr().err
