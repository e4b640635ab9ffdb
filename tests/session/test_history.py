"""Estimates come from earlier work with the same target on this machine, or there are none."""

import pytest

from klbench.session import events as ev
from klbench.session.folder import make_session, new_session_path
from klbench.session.history import arm_tokens, past_of
from klbench.session.log import EventLog
from klbench.session.process_identity import this_host

TARGET = {"kind": "demo", "model": "dense", "arguments": []}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))


def earlier(label, *, launch_s=20.0, rate=0.001, target=TARGET, host=None, arms=("generation", "scoring")):
    folder = make_session(new_session_path(label), target, {})
    with EventLog(folder.events) as log:
        log.append(
            ev.RunnerStarted(
                klbench_version="0.1", pid=1, host=host or this_host(), target=target, options={}
            )
        )
        log.append(ev.ServerReady(server={}, url="u", launch_s=launch_s))
        for arm in arms:
            log.append(ev.ArmStarted(run=1, helper="match", arm=arm, requests=2, tokens=1000))
            log.append(ev.ArmEnded(run=1, helper="match", arm=arm, elapsed_s=1000 * rate))
    return folder


def test_the_median_of_earlier_work_is_the_estimate():
    for number, (launch_s, rate) in enumerate([(20.0, 0.001), (30.0, 0.002), (900.0, 0.5)]):
        earlier(f"s{number}", launch_s=launch_s, rate=rate)
    past = past_of(TARGET)
    assert past.launch_s == 30.0
    assert past.run_s(["match"], 600, 2, 100) == pytest.approx(2 * 800 * 0.002)


def test_what_was_never_measured_has_no_estimate():
    assert past_of(TARGET).launch_s is None
    earlier("one", arms=("generation",))
    assert past_of(TARGET).run_s(["match"], 600, 2, 100) is None


@pytest.mark.parametrize(
    "other",
    [
        {"target": {"kind": "demo", "model": "moe"}},
        {"target": {**TARGET, "arguments": ["--page-size", "16"]}},
        {"host": "elsewhere"},
    ],
)
def test_another_target_or_machine_says_nothing(other):
    earlier("one", **other)
    assert past_of(TARGET).launch_s is None


def test_the_second_turn_counts_its_own_prompts():
    assert arm_tokens("decode_cache_hit", 100, 2, 10) == {"warming": 120, "generation": 142, "scoring": 142}
    assert arm_tokens("prefill_cache_hit", 100, 2, 10)["warming"] == 100


def test_a_damaged_log_gives_what_it_has():
    folder = earlier("one")
    with open(folder.events, "ab") as log:
        log.write(b"\xff\n{\n")
    assert past_of(TARGET).launch_s == 20.0
