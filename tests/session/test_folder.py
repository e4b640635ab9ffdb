"""Who may work in a session's folder, and what lies in it."""

import os
import socket
import stat
import subprocess
import sys

import msgspec
import pytest

from klbench.errors import UsageError
from klbench.session.folder import SessionFolder, find_session, make_session, new_session_path
from klbench.session.lock import Lock
from klbench.session.process_identity import process_start
from klbench.session.reading import find_runner


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))


def a_session(label="demo-dense"):
    return make_session(new_session_path(label), {"kind": "demo", "model": "dense"}, {"samples": 4})


def write_lock(folder, **fields):
    folder.lock_file.write_bytes(msgspec.json.encode(Lock(**fields)))


def test_a_session_is_its_owners_alone_and_says_what_it_is():
    folder = a_session()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    content = folder.read_session_file()
    assert (content.schema, content.target["model"]) == ("klbench.session/1", "dense")


def test_a_label_from_outside_cannot_leave_the_root():
    path = new_session_path("../../etc/passwd\n\x1b")
    assert path.parent.name == "sessions"
    assert path.name.isprintable()


def test_sessions_of_the_same_second_have_folders_of_their_own():
    assert len({new_session_path("x") for _ in range(5)}) == 5


def test_two_klbench_on_one_folder_refuse_and_name_the_first():
    folder = a_session()
    with folder.locked():
        with pytest.raises(UsageError, match=f"another klbench works on .*pid {os.getpid()}"):
            folder.locked().__enter__()
        assert find_runner(folder).pid == os.getpid()
    assert find_runner(folder) is None


def test_the_lock_of_a_dead_process_is_taken_over():
    folder = a_session()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    start = process_start(dead.pid) or "gone"
    dead.wait()
    write_lock(folder, host=socket.gethostname(), pid=dead.pid, start=start)
    with folder.locked() as lock:
        assert lock.pid == os.getpid()


def test_a_pid_that_was_used_again_is_not_the_runner():
    folder = a_session()
    write_lock(folder, host=socket.gethostname(), pid=os.getpid(), start="of another process")
    with folder.locked():
        pass


def test_a_lock_of_another_host_is_never_judged_dead():
    folder = a_session()
    write_lock(folder, host="elsewhere", pid=2**22, start="x")
    with pytest.raises(UsageError, match="pid 4194304 on elsewhere") as refused:
        folder.locked().__enter__()
    assert str(folder.lock_file) in refused.value.next
    assert find_runner(folder).host == "elsewhere"


def test_a_lock_of_another_container_on_this_host_is_never_judged_dead():
    folder = a_session()
    write_lock(folder, host=socket.gethostname(), pid=2**22, start="x", namespace="pid:[1]")
    with pytest.raises(UsageError, match="pid 4194304 in another container of this host") as refused:
        folder.locked().__enter__()
    assert "its last sign of life" in refused.value.why or "written nothing yet" in refused.value.why


TAKER = """
import sys
from klbench.session.folder import SessionFolder
from klbench.errors import UsageError
import pathlib
print("ready", flush=True)
sys.stdin.readline()
try:
    with SessionFolder(pathlib.Path(sys.argv[1])).locked():
        print("won", flush=True)
        sys.stdin.readline()
except UsageError as error:
    print("lost", error.what, flush=True)
"""


@pytest.mark.parametrize("before", ["nothing", "a dead one", "garbage"])
@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_take_a_lock_at_once_one_wins(before, links):
    folder = a_session()
    if before == "a dead one":
        write_lock(folder, host=socket.gethostname(), pid=2**22, start="x")
    elif before == "garbage":
        folder.lock_file.write_bytes(b"{")
    program = TAKER
    if not links:
        program = f"import os\ndef link(*_): raise OSError(1, 'no links here')\nos.link = link\n{TAKER}"
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for taker in takers:
        assert taker.stdout.readline() == "ready\n"
    for taker in takers:
        taker.stdin.write("go\n")
        taker.stdin.flush()
    said = [taker.stdout.readline() for taker in takers]
    assert sorted(line.split()[0] for line in said) == ["lost"] * 5 + ["won"]
    winner = takers[said.index("won\n")]
    assert folder.read_lock().pid == winner.pid
    for taker in takers:
        taker.communicate()
    assert not folder.lock_file.exists()
    assert not list(folder.path.glob(".lock*"))


def test_a_zombie_holds_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None
    child.wait()


def test_a_damaged_lock_does_not_lock():
    folder = a_session()
    folder.lock_file.write_bytes(b"\xff{")
    with folder.locked():
        pass


def test_a_folder_with_other_files_is_no_place_for_a_session(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(UsageError, match="holds other files"):
        make_session(tmp_path / "thesis", {}, {})


def test_a_session_of_another_format_says_who_wrote_it():
    folder = a_session()
    content = {"schema": "klbench.session/9", "klbench_version": "9.1", "created_at": 1.0}
    (folder.path / "session.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(UsageError, match=r"klbench\.session/9") as refused:
        folder.read_session_file()
    assert "9.1" in refused.value.why


def test_an_event_cannot_name_a_file_outside_of_its_session(tmp_path):
    folder = a_session()
    (folder.path / "runs" / "link").symlink_to(tmp_path)
    for name in ("../../x", "/etc/passwd", "runs/link/x"):
        with pytest.raises(UsageError, match="outside"):
            folder.resolve(name)
    assert folder.resolve("runs/1.npz") == folder.runs / "1.npz"


@pytest.mark.parametrize(
    "name", ["", ".", "runs", "runs/pipe", "runs/circle", "a\0b", "x" * 5000, "x/" * 5000]
)
def test_a_name_that_is_no_files_is_refused_in_words(name):
    folder = a_session()
    os.mkfifo(folder.runs / "pipe")
    (folder.runs / "circle").symlink_to("circle")
    with pytest.raises(UsageError, match=r"no regular file|names no file"):
        folder.resolve(name)


def test_a_pipe_in_the_place_of_a_small_file_is_not_waited_for(monkeypatch):
    folder = a_session()

    def waits(file, *_args):
        raise AssertionError(f"{file} would be waited for")

    # What opens a file without asking what it is.
    monkeypatch.setattr("builtins.open", waits)
    for file in (folder.lock_file, folder.path / "session.json"):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    assert folder.read_lock() is None
    with pytest.raises(UsageError, match="cannot read"):
        folder.read_session_file()


def test_a_session_is_found_by_path_by_name_and_by_the_beginning_of_its_name():
    folder = a_session("one")
    assert find_session(str(folder.path)).path == folder.path
    assert find_session(folder.name).path == folder.path
    assert find_session(folder.name[:-1]).path == folder.path
    for nothing in ("", " "):
        with pytest.raises(UsageError, match="is empty"):
            find_session(nothing)
    a_session("two")
    with pytest.raises(UsageError, match="more than one"):
        find_session(folder.name[:4])
    with pytest.raises(UsageError, match="no session"):
        find_session("nothing")


def test_a_folder_that_is_a_link_is_followed_only_to_a_folder_of_ours(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="not a folder of yours"):
        make_session(tmp_path / "link", {}, {})
    assert not SessionFolder(tmp_path / "real").exists()
