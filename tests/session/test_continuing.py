"""A killed runner loses at most the arm in flight; what goes on is the same run, whole and nothing twice."""

import json
import os
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from klbench.cli.headless import Plan, execute
from klbench.core.columns import HELPERS
from klbench.errors import ExitCode, UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.arm_file import load_arm
from klbench.session.columns import load_columns
from klbench.session.continuing import continues
from klbench.session.detached import run_detached
from klbench.session.folder import SessionFolder
from klbench.session.interruption import interrupted, start_to_continue
from klbench.session.link import RunnerOrder
from klbench.session.log import read_log
from klbench.session.reading import read_state
from klbench.session.request import Options, StartRequest, Target
from tests.session.fake_engine import FakeBench

START = StartRequest(
    target=Target(kind="demo", model="dense"), options=Options(samples=3, max_new_tokens=6, prompt_tokens=300)
)
ARMS = {
    "match": ("generation", "scoring"),
    "prefill_cache_hit": ("warming", "generation", "scoring"),
    "decode_cache_hit": ("warming", "generation", "scoring"),
}
PROGRAM = """
import functools, pathlib, sys
from klbench.cli.headless import Plan, execute
from tests.session.fake_engine import FakeBench
from tests.session.test_continuing import START
hold = tuple(sys.argv[2].split())
sys.exit(execute(START, Plan("run"), session=pathlib.Path(sys.argv[1]), json_place=None,
                 make_work=functools.partial(FakeBench, hold=hold)))
"""


pytestmark = pytest.mark.usefixtures("places")


def killed_in(session, helper, arm):
    """A session whose runner was killed with SIGKILL in the middle of that arm."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(session), f"{helper} {arm}"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line == f"at {helper} {arm}\n":
            break
    else:
        raise AssertionError("".join(seen))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return SessionFolder(session)


def go_on(session, start=START, **bench):
    place = session.parent / "result.json"
    code = execute(
        start,
        Plan("run"),
        session=session,
        json_place=str(place),
        make_work=lambda its: FakeBench(its, **bench),
    )
    return code, json.loads(place.read_text())


def arms_run(capfd):
    """(helper, arm) in the order in which the server was asked, since the last look."""
    return [tuple(line.split()[1:]) for line in capfd.readouterr().err.split("\n") if line.startswith("at ")]


@pytest.mark.parametrize(("helper", "arm"), [(h, a) for h, arms in ARMS.items() for a in arms])
def test_after_a_kill_only_the_arm_in_flight_is_repeated(tmp_path, capfd, helper, arm):
    whole_code, whole = go_on(tmp_path / "whole")
    folder = killed_in(tmp_path / "killed", helper, arm)
    before = read_state(folder)
    assert not before.runner.alive
    assert interrupted(before).left == tuple(HELPERS[HELPERS.index(helper) :])
    capfd.readouterr()
    code, document = go_on(folder.path)
    assert (code, document["helpers"]) == (whole_code, whole["helpers"])
    assert document["verdict"] == whole["verdict"]
    # Scoring reads no cache. Whatever comes before it needs the cache that went with the server.
    first = ["scoring"] if arm == "scoring" else list(ARMS[helper])
    later = [(h, a) for h in HELPERS[HELPERS.index(helper) + 1 :] for a in ARMS[h]]
    assert arms_run(capfd) == [(helper, name) for name in first] + later
    state = read_state(folder)
    assert [run.number for run in state.runs] == [1]
    assert interrupted(state) is None
    ended = [
        entry.event.helper for entry in read_log(folder.events) if isinstance(entry.event, ev.HelperEnded)
    ]
    assert ended == list(HELPERS)
    for name in HELPERS:
        one, two = (
            load_columns(place / "runs" / f"1-{name}.npz") for place in (tmp_path / "whole", folder.path)
        )
        assert np.array_equal(one.decode_nats, two.decode_nats)
        assert np.array_equal(one.prefill_nats, two.prefill_nats)
        assert np.array_equal(one.prompt_ids, two.prompt_ids)
    assert not list(folder.runs.glob("*-generation.npz"))


def test_a_generation_arm_of_another_server_is_not_scored_on_this_one(tmp_path, capfd):
    folder = killed_in(tmp_path / "s", "match", "scoring")
    capfd.readouterr()
    go_on(folder.path, commit="b" * 40)
    told = capfd.readouterr().err
    assert "at match generation" in told
    assert "the generation arm of match is repeated" in told
    assert "git_commit" in told


def test_a_damaged_generation_arm_is_repeated(tmp_path, capfd):
    folder = killed_in(tmp_path / "s", "match", "scoring")
    (file,) = folder.runs.glob("*-generation.npz")
    content = file.read_bytes()
    for end in range(0, len(content), 37):
        file.write_bytes(content[:end])
        assert load_arm(file) is None
    capfd.readouterr()
    go_on(folder.path)
    assert arms_run(capfd)[:2] == [("match", "generation"), ("match", "scoring")]


def test_another_experiment_in_the_same_session_is_a_run_of_its_own(tmp_path):
    folder = killed_in(tmp_path / "s", "prefill_cache_hit", "scoring")
    longer = StartRequest(
        target=START.target, options=Options(samples=3, max_new_tokens=7, prompt_tokens=300)
    )
    go_on(folder.path, start=longer)
    state = read_state(folder)
    assert [run.number for run in state.runs] == [1, 2]
    assert [helper.status for helper in state.runs[0].helpers][1:] == ["stopped", "stopped"]


def test_what_makes_it_another_experiment_is_named(tmp_path):
    folder = killed_in(tmp_path / "s", "match", "scoring")
    state = read_state(folder)
    found = interrupted(state)
    assert continues(START, found, state) is None
    other = StartRequest(target=Target(kind="demo", model="moe"), options=Options(seed=2, samples=3))
    assert continues(other, found, state) == "model, max_new_tokens, prompt_tokens, seed"


def test_prompts_that_are_not_those_of_the_run_are_refused(tmp_path, capfd):
    folder = killed_in(tmp_path / "s", "match", "scoring")
    (prompts,) = folder.runs.glob("prompts-*.jsonl")
    lines = prompts.read_text().replace("5", "4")
    prompts.write_text(lines)
    code, document = go_on(folder.path)
    assert code == ExitCode.UNDECIDED
    assert "prompts of run 1 cannot be repeated" in document["error"]["what"]
    prompts.unlink()
    capfd.readouterr()
    assert go_on(folder.path)[0] == ExitCode.DIVERGED
    assert arms_run(capfd)[0] == ("match", "scoring")


def test_an_interrupted_run_says_where_it_was(tmp_path):
    folder = killed_in(tmp_path / "s", "prefill_cache_hit", "generation")
    words = interrupted(read_state(folder)).in_words
    assert words == ("run 1 was interrupted in prefill_cache_hit (generation arm), then decode_cache_hit")


def test_a_finished_run_is_not_continued_and_a_session_is_repeated_instead(tmp_path):
    go_on(tmp_path / "s")
    assert interrupted(read_state(SessionFolder(tmp_path / "s"))) is None
    go_on(tmp_path / "s")
    assert [run.number for run in read_state(SessionFolder(tmp_path / "s")).runs] == [1, 2]


def test_a_session_with_a_key_is_not_continued_without_it(tmp_path):
    target = Target(kind="launch", model_path="/m", arguments=("--api-key", "s3cret"))
    start = StartRequest(target=target, options=START.options)
    go_on(tmp_path / "s", start=start)
    folder = SessionFolder(tmp_path / "s")
    with pytest.raises(UsageError, match="cannot continue") as refused:
        start_to_continue(folder, read_state(folder))
    assert "key" in refused.value.why
    assert isinstance(refused.value, UsageError)
    assert not isinstance(refused.value, UndecidedError)


def test_a_detached_runner_takes_up_the_interrupted_run_and_ends_when_idle(tmp_path, capfd):
    folder = killed_in(tmp_path / "s", "prefill_cache_hit", "scoring")
    capfd.readouterr()
    order = RunnerOrder(start=start_to_continue(folder, read_state(folder)), continue_run=True)
    code = run_detached(folder.path, msgspec.json.encode(order), FakeBench, keep_idle_s=0.0)
    assert code == ExitCode.CONSISTENT
    assert arms_run(capfd)[0] == ("prefill_cache_hit", "scoring")
    (run,) = read_state(folder).runs
    assert [helper.status for helper in run.helpers] == ["diverged"] * 3


def test_the_session_says_how_long_an_idle_runner_stays(tmp_path):
    options = msgspec.structs.replace(START.options, keep_idle_s=0.0)
    order = RunnerOrder(start=msgspec.structs.replace(START, options=options), run_first=False)
    assert run_detached(tmp_path / "s", msgspec.json.encode(order), FakeBench) == ExitCode.CONSISTENT
    assert "idle" in read_state(SessionFolder(tmp_path / "s")).runner.ended
