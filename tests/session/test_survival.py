"""What a lost terminal, a killed screen and a killed runner do to a run on the real server: nothing is
measured twice, nothing is missing, and at most the arm in flight is repeated."""

import os
import signal
import time
from collections import Counter

import pytest

from klbench.core.columns import HELPERS
from klbench.session import events as ev
from klbench.session.columns import load_columns
from klbench.session.folder import SessionFolder
from klbench.session.log import LogTail, read_log
from klbench.session.reading import find_runner, read_state
from tests.session.terminals import Terminal

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

ARMS = [
    ("match", "generation"),
    ("match", "scoring"),
    *((name, arm) for name in HELPERS[1:] for arm in ("warming", "generation", "scoring")),
]
REQUESTS, NEW_TOKENS = 8, 64
SIZE = ("--samples", str(REQUESTS), "--max-new-tokens", str(NEW_TOKENS), "--prompt-tokens", "120")


@pytest.fixture
def open_terminal(tmp_path):
    environment = {**os.environ, "KLBENCH_HOME": str(tmp_path / "home")}
    environment.pop("XDG_RUNTIME_DIR", None)
    opened = []

    def start(*arguments):
        opened.append(Terminal(*arguments, environment=environment))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()
    session = SessionFolder(tmp_path / "session")
    if (lock := find_runner(session)) is not None:
        os.kill(lock.pid, signal.SIGTERM)
        wait_for(lambda: find_runner(session) is None)


def wait_for(condition, limit_s=1800.0):
    """It is another process's doing, of which there is no other word than its files."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_event(session, wanted):
    """Waits until the log holds an event for which `wanted` is true."""
    tail = LogTail(session.events)
    wait_for(lambda: any(wanted(entry.event) for entry in tail.poll()))


def begun(helper, arm, number):
    return lambda event: isinstance(event, ev.ArmProgress | ev.ArmStarted) and (
        event.helper, event.arm, event.run
    ) == (helper, arm, number)  # fmt: skip


def taken_by(terminal, event):
    return isinstance(event, ev.ControlTaken) and event.pid == terminal.process.pid


def arms_started(session, number):
    return [
        (entry.event.helper, entry.event.arm)
        for entry in read_log(session.events)
        if isinstance(entry.event, ev.ArmStarted) and entry.event.run == number
    ]


def check_whole(session, number):
    """Nothing twice, nothing missing: numbers of events without a gap, one result of each helper, every token
    of every request in the columns."""
    entries = read_log(session.events)
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    ended = Counter(
        entry.event.helper
        for entry in entries
        if isinstance(entry.event, ev.HelperEnded) and entry.event.run == number
    )
    assert ended == Counter(HELPERS)
    run = read_state(session).runs[number - 1]
    for helper in run.helpers:
        assert (helper.status, helper.result["avg_kl_div"]) == ("clean", 0.0)
        columns = load_columns(session.resolve(helper.columns))
        assert columns.requests == REQUESTS
        assert len(columns.token_id) == REQUESTS * NEW_TOKENS == helper.result["tokens"]


def test_a_run_survives_its_terminal_its_screen_and_its_runner(open_terminal, tmp_path):
    session = SessionFolder(tmp_path / "session")
    first = open_terminal("demo", "dense", *SIZE, "--session", str(session.path))
    wait_for_event(session, begun("match", "generation", 1))
    runner = find_runner(session)
    assert first.hang_up() == 129
    assert find_runner(session) == runner

    # From another terminal: the same session, where it is now; a third one watches.
    second = open_terminal("open", str(session.path))
    second.until(lambda text: "match" in text and "deterministic" in text)
    # Its screen is there before it has asked for control; a third one that asked first would have it.
    wait_for_event(session, lambda event: taken_by(second, event))
    third = open_terminal("open", str(session.path))
    third.until(lambda text: "WATCHING" in text)
    assert "WATCHING" not in second.text
    second.process.kill()
    second.process.wait()
    third.until(lambda text: "nobody has control" in text)
    third.press(b"C")
    third.until(lambda text: "WATCHING" not in text)
    wait_for_event(session, lambda event: isinstance(event, ev.RunEnded))
    assert arms_started(session, 1) == ARMS
    assert find_runner(session) == runner
    check_whole(session, 1)

    # The runner itself is killed in the middle of an arm.
    third.until(lambda text: "run again" in text)
    third.press(b"r")
    wait_for_event(session, begun("prefill_cache_hit", "generation", 2))
    os.kill(runner.pid, signal.SIGKILL)
    third.until(lambda text: "finished session" in text or "interrupted" in text)
    third.press(b"q")
    assert third.process.wait(600) == 0
    before = arms_started(session, 2)
    fourth = open_terminal("open", "--continue", str(session.path))
    wait_for_event(session, lambda event: isinstance(event, ev.RunEnded) and event.run == 2)
    # The cache went with the server, so what fills it comes before the arm that was in flight.
    repeated = arms_started(session, 2)[len(before) :]
    assert repeated == [("prefill_cache_hit", "warming"), ("prefill_cache_hit", "generation"), *ARMS[4:]]
    check_whole(session, 2)
    assert read_state(session).runs[0].helper("match").result == read_state(session).runs[1].helper(
        "match"
    ).result  # fmt: skip
    fourth.close()
