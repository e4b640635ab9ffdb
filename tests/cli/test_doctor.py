"""`klbench doctor`: what this machine can do, and what it says of terminals."""

import json

import pytest

from klbench.cli import main
from klbench.errors import ExitCode


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))


def test_doctor_says_what_this_machine_can_do(capsys):
    code = main(["doctor", "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert code == (ExitCode.CONSISTENT if found["ok"] else ExitCode.DIVERGED)
    assert {check["name"] for check in found["checks"]} >= {
        "state",
        "socket",
        "sglang",
        "gpu",
        "disk",
        "locale",
    }


def test_doctor_calls_an_unwritable_state_folder_broken(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KLBENCH_HOME", str(blocked))
    assert main(["doctor"]) == ExitCode.DIVERGED
    assert "set KLBENCH_HOME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "lines", "status"), [(120, 40, "ok"), (60, 16, "ok"), (59, 16, "note"), (60, 15, "note")]
)
def test_doctor_notes_a_terminal_where_the_workbench_does_not_open(
    columns, lines, status, monkeypatch, capsys
):
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(columns)), ("LINES", str(lines))):
        monkeypatch.setenv(name, value)
    main(["doctor", "--json", "-"])
    (found,) = (c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == "terminal")
    assert found["status"] == status
    assert ("60x16" in (found["mend"] or "")) == (status == "note")
