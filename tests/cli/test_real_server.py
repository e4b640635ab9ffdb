"""The whole program on the real server: answers, Ctrl-C, and nothing left after kill -9."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from klbench.session.folder import SessionFolder
from klbench.session.reading import read_state

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

SMALL = ["--samples", "8", "--max-new-tokens", "24", "--prompt-tokens", "120"]


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "KLBENCH_HOME": str(tmp_path / "home")}


def start(environment, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "klbench", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process, words):
    """Reads stderr until a line holds the words."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} never came:\n{''.join(seen)}")


def processes_of(session):
    """The processes of the session's server: they carry its nonce in their environment."""
    command = read_state(SessionFolder(session)).server.command
    (nonce,) = (word.partition("=")[2] for word in command.split() if word.startswith("KLBENCH_NONCE="))
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"KLBENCH_NONCE={nonce}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def gone(session, limit_s=600):
    """Whether the session's server goes away within the limit."""
    deadline = time.monotonic() + limit_s
    while processes_of(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_run_and_locate_tell_the_truth_about_a_planted_fault(environment, tmp_path):
    session = tmp_path / "session"
    process = start(
        environment,
        "locate",
        "--demo",
        "--fault",
        "restore-key",
        *SMALL,
        "--json",
        "-",
        "--session",
        str(session),
    )
    out, err = process.communicate()
    assert process.returncode == 1, err
    document = json.loads(out)
    assert document["statuses"] == {
        "match": "clean",
        "prefill_cache_hit": "diverged",
        "decode_cache_hit": "diverged",
    }
    assert (document["helper"], document["alignment"]["proved"]) == ("prefill_cache_hit", True)
    (finding,) = [f for f in document["findings"] if not f["latent"]]
    assert finding["module"].endswith("layers.1.self_attn.attn")
    assert "state_restore" in finding["kinds"]
    assert gone(session)
    state = read_state(SessionFolder(session))
    assert state.run.helper("match").result["avg_kl_div"] == 0.0
    assert (session / state.run.helper("match").columns).is_file()
    texts = json.loads((session / state.run.helper("match").texts).read_bytes())
    assert all(isinstance(text, str) for text in texts.values())

    told = subprocess.run(
        [sys.executable, "-m", "klbench", "report", str(session)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    markdown = Path(told.stdout.split()[0]).read_text()
    assert "layers.1.self_attn.attn" in markdown
    assert "restore-key" in markdown


def test_a_consistent_server_reads_zero_and_what_ctrl_c_interrupts_goes_on_from_there(environment, tmp_path):
    session, place = tmp_path / "session", tmp_path / "result.json"
    # Arms of some seconds: the signal must come before the second one has ended.
    longer = ["--samples", "8", "--max-new-tokens", "72", "--prompt-tokens", "120"]
    process = start(environment, "run", "--demo", *longer, "--json", str(place), "--session", str(session))
    wait_for_line(process, "decode_cache_hit · warming arm")
    process.send_signal(signal.SIGINT)
    process.communicate()
    document = json.loads(place.read_text())
    helpers = document["helpers"]
    assert process.returncode == 130
    assert document["error"]["what"] == "interrupted by SIGINT"
    assert [helpers[name]["avg_kl_div"] for name in ("match", "prefill_cache_hit")] == [0.0, 0.0]
    assert helpers["decode_cache_hit"]["status"] == "not_run"
    assert gone(session)

    process = start(environment, "run", "--session", str(session), "--json", str(place))
    _, told = process.communicate()
    assert process.returncode == 0, told
    arms = [line.split(" · ")[:2] for line in told.split("\n") if " arm · 8 requests" in line]
    assert arms == [["decode_cache_hit", f"{arm} arm"] for arm in ("warming", "generation", "scoring")]
    again = json.loads(place.read_text())["helpers"]
    assert [result["avg_kl_div"] for result in again.values()] == [0.0, 0.0, 0.0]
    assert again["match"] == helpers["match"]
    assert len(read_state(SessionFolder(session)).runs) == 1
    assert gone(session)


def test_kill_9_of_a_headless_command_leaves_no_process(environment, tmp_path):
    session = tmp_path / "session"
    process = start(environment, "run", "--demo", *SMALL, "--session", str(session))
    wait_for_line(process, "server importing")
    assert processes_of(session)
    process.kill()
    process.communicate()
    assert gone(session)
    state = read_state(SessionFolder(session))
    assert not state.runner.alive
    assert state.server.phase == "stopped"
