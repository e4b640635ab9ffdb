"""What frees space takes traces first, asks first, and leaves working sessions alone."""

import json
import os
import time

import pytest

from klbench.cli import main
from klbench.errors import ExitCode, UsageError
from klbench.session import events as ev
from klbench.session.folder import make_session, new_session_path
from klbench.session.log import EventLog
from klbench.session.pruning import candidates, remove


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))


def a_session(label, traces=1000, age_days=0.0):
    folder = make_session(new_session_path(label), {"kind": "demo", "model": "dense"}, {})
    with EventLog(folder.events) as log:
        log.append(ev.RunnerEnded(reason="done"))
    (folder.traces / "t").mkdir(parents=True)
    (folder.traces / "t" / "shard.safetensors").write_bytes(b"x" * traces)
    then = time.time() - age_days * 86400
    os.utime(folder.events, (then, then))
    return folder


def test_traces_go_and_everything_that_was_measured_stays(capsys):
    folder = a_session("one")
    (folder.runs / "1-match.npz").write_bytes(b"columns")
    assert main(["sessions", "prune", "--yes", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["size_bytes"] == 1000
    assert not folder.traces.exists()
    assert (folder.runs / "1-match.npz").exists()
    assert main(["sessions", "prune", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_without_agreement_nothing_goes(capsys):
    folder = a_session("one")
    assert main(["sessions", "prune"]) == ExitCode.USAGE
    assert "agree with --yes" in capsys.readouterr().err
    assert folder.traces.exists()


def test_a_session_at_work_is_left_alone_and_named(capsys):
    folder = a_session("one")
    with folder.locked():
        assert main(["sessions", "prune", "--yes"]) == 0
        assert f"left alone: {folder.name}" in capsys.readouterr().err
    assert folder.traces.exists()


def test_a_runner_that_comes_between_the_question_and_the_removal_is_safe():
    folder = a_session("one")
    ((found,), _) = candidates(None, older_than_days=None, whole=False)
    with folder.locked(), pytest.raises(UsageError, match="another klbench works"):
        remove(found, whole=False)
    assert folder.traces.exists()


def test_whole_sessions_go_only_when_named_or_old_enough(capsys):
    old, new = a_session("old", age_days=40), a_session("new")
    assert main(["sessions", "prune", "--whole", "--yes"]) == ExitCode.USAGE
    assert main(["sessions", "prune", "--whole", "--older-than", "30", "--yes"]) == 0
    assert not old.path.exists()
    assert new.path.exists()
    assert main(["sessions", "prune", new.name, "--whole", "--yes"]) == 0
    assert not new.path.exists()
    capsys.readouterr()


def test_a_link_in_place_of_the_traces_is_removed_and_not_followed(tmp_path):
    folder = a_session("one")
    elsewhere = tmp_path / "elsewhere"
    folder.traces.rename(elsewhere)
    folder.traces.symlink_to(elsewhere)
    (folder.path / "traces2").mkdir()
    found, _ = candidates([folder], older_than_days=None, whole=True)
    remove(found[0], whole=True)
    assert (elsewhere / "t" / "shard.safetensors").exists()
    assert not folder.path.exists()


def test_the_list_says_sizes_and_names_what_it_cannot_read(capsys):
    folder = a_session("one")
    newer = a_session("newer")
    content = (newer.path / "session.json").read_bytes().replace(b"klbench.session/1", b"klbench.session/9")
    (newer.path / "session.json").write_bytes(content)
    assert main(["sessions"]) == 0
    shown = capsys.readouterr().out
    assert f"{folder.name}" in shown
    assert "1.0 kB" in shown
    assert f"{newer.name}  cannot be read:" in shown
    assert "klbench.session/9" in shown
    assert main(["sessions", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sessions"][0]["traces_bytes"] == 1000
    assert document["unreadable"][0]["session"] == str(newer.path)
