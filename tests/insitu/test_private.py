"""Whose folders the plugin obeys: its own user's and the one's that its exports name, and nobody else's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from klbench.engine.pythonpath import plugin_environment
from klbench.insitu import private
from klbench.insitu.private import check_private, file_mode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir(mode=0o700)
    return tmp_path / "own"


@pytest.fixture
def as_another_user(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process as it sees itself in a container: somebody else than the folder's owner."""
    owner = os.getuid()
    monkeypatch.setattr(private.os, "getuid", lambda: owner + 1)
    return owner


def test_a_folder_of_our_own_is_obeyed_and_its_files_are_ours_alone(folder: Path) -> None:
    check_private(folder)
    assert file_mode(folder) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o701, 0o750])
def test_a_folder_that_others_reach_is_refused_with_its_mode(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(RuntimeError, match=f"{mode:04o}"):
        check_private(folder)


def test_another_users_folder_is_refused(folder: Path, as_another_user: int) -> None:
    with pytest.raises(RuntimeError, match=f"user {as_another_user}'s"):
        check_private(folder)


@pytest.mark.parametrize("named", ["", "root", "-1", "99999999"])
def test_only_the_user_that_is_named_is_obeyed(
    folder: Path, as_another_user: int, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    assert str(as_another_user) != named
    monkeypatch.setenv(private.OWNER_VARIABLE, named)
    with pytest.raises(RuntimeError):
        check_private(folder)


def test_the_named_owner_is_obeyed_and_can_read_what_is_written_there(
    folder: Path, as_another_user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(private.OWNER_VARIABLE, str(as_another_user))
    check_private(folder)
    assert file_mode(folder) == 0o644


def test_a_relative_path_and_a_file_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(RuntimeError):
        check_private(Path("own"))
    (folder / "file").write_text("")
    (folder / "file").chmod(0o600)
    with pytest.raises(RuntimeError):
        check_private(folder / "file")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder to another user")
def test_a_server_that_is_root_writes_what_its_owner_can_read(folder: Path) -> None:
    nobody = 65534
    environment = plugin_environment(
        folder, "n1", cpu=False, fault=None, base_env={"PATH": os.environ["PATH"]}
    ) | {private.OWNER_VARIABLE: str(nobody)}
    os.chown(folder, nobody, nobody)
    program = "from klbench_insitu.plugin import activate; activate()"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    (presence,) = folder.glob("presence-launcher-*.json")
    assert presence.stat().st_mode & 0o777 == 0o644
