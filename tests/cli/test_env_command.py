"""`klbench env`: exports for one server, in the paths that this server will see."""

import json

import pytest

from klbench.cli import main
from klbench.errors import ExitCode


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_mapped_folder_is_exported_as_the_server_sees_it(home, capsys):
    assert main(["env", "--path-map", f"/klb={home}", "--json", "-"]) == ExitCode.CONSISTENT
    told = capsys.readouterr()
    exports = json.loads(told.out)
    nonce = exports["environment"]["KLBENCH_NONCE"]
    assert exports["environment"]["KLBENCH_INSITU_DIR"] == f"/klb/attach/{nonce}"
    assert exports["pythonpath"] == [f"/klb/attach/{nonce}/pythonpath/plugin"]
    # What klbench itself uses lies where it really is.
    assert (home / "attach" / nonce / "pythonpath" / "plugin" / "klbench_insitu").is_dir()
    assert f"--path-map /klb={home}" in told.err


def test_a_map_that_is_none_is_refused_before_anything_is_made(home, capsys):
    assert main(["env", "--path-map", "klb"]) == ExitCode.USAGE
    assert "no pair of folders" in capsys.readouterr().err
    assert not home.exists()
