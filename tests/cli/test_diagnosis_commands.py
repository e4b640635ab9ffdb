"""guide, experiment, calibrate and emit-test: what they take, refuse and print."""

from __future__ import annotations

import ast
import json

import pytest

from klbench.cli import calibrate, experiment, main
from klbench.core.guide import STEPS
from klbench.errors import ExitCode


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan_of(monkeypatch):
    """The plan that a command line makes, instead of the work."""
    made = []
    monkeypatch.setattr(
        "klbench.cli.headless.execute", lambda start, plan, **_: made.append((start, plan)) or 0
    )

    def plan(*arguments):
        assert main(list(arguments)) == 0
        return made[-1]

    return plan


def test_the_guide_names_every_step_and_explains_one(capsys):
    assert main(["guide"]) == 0
    said = capsys.readouterr().out
    assert all(step.title in said for step in STEPS)
    assert main(["guide", "condition_1"]) == 0
    assert "klbench census" in capsys.readouterr().out
    assert main(["guide", "--terms"]) == 0
    assert "batch invariance" in capsys.readouterr().out


def test_the_guide_is_data(capsys):
    assert main(["guide", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [step["code"] for step in document["steps"]] == [step.code for step in STEPS]


def test_an_unknown_step_is_refused_with_those_there_are(capsys):
    assert main(["guide", "nonsense"]) == ExitCode.USAGE
    assert "condition_1" in capsys.readouterr().err


def test_every_command_of_the_guide_exists():
    from klbench.cli.commands import klbench

    assert {step.command.split()[1] for step in STEPS} <= set(klbench.commands)


def test_every_key_of_the_guide_exists():
    from klbench.tui.actions import ACTIONS

    keys = {key for action in ACTIONS for key in action.keys}
    assert {"at" if step.key == "@" else step.key for step in STEPS} <= keys


def test_experiments_become_a_plan(plan_of):
    _, plan = plan_of(
        "experiment", "repeats", "alone", "--demo", "--helper", "match", "--max-relaunches", "2"
    )
    assert (plan.what, plan.experiments, plan.helper, plan.max_relaunches) == (
        "experiment", ("repeats", "alone"), "match", 2,
    )  # fmt: skip
    start, _ = plan_of("experiment", "overlap", "--demo", "--", "--page-size", "16")
    assert start.target.arguments == ("--page-size", "16")


@pytest.mark.usefixtures("plan_of")
def test_an_unknown_experiment_is_refused_before_anything_starts(capsys):
    assert main(["experiment", "nonsense", "--demo"]) == ExitCode.USAGE
    assert "wide_restore" in capsys.readouterr().err
    assert main(["experiment", "--demo"]) == ExitCode.USAGE


def test_calibrate_repeats_the_helpers(plan_of):
    _, plan = plan_of("calibrate", "--demo", "--passes", "5")
    assert (plan.what, plan.passes) == ("calibrate", 5)
    assert main(["calibrate", "--demo", "--passes", "1"]) == ExitCode.USAGE


@pytest.mark.usefixtures("plan_of")
def test_emit_test_never_overwrites(tmp_path, capsys):
    (tmp_path / "test_demo_dense_kl.py").write_text("mine")
    assert main(["emit-test", "--demo"]) == ExitCode.USAGE
    assert "there already" in capsys.readouterr().err
    assert (tmp_path / "test_demo_dense_kl.py").read_text() == "mine"


def test_outcomes_are_printed_with_their_meaning():
    document = {
        "session": "/s",
        "helper": "match",
        "plan": {"launches": 1, "estimate_s": 65.0, "steps": [{"passes": 2}]},
        "experiments": [
            {"name": "repeats", "outcome": "same_bits", "text": "5 repeats", "meaning": "no race showed"},
            {"name": "graphs", "outcome": "not_possible", "text": "no graphs", "meaning": "nothing"},
        ],
        "verdict": {"status": "found", "conditions": ["batch_invariance"], "grade": "probable"},
    }
    said = "\n".join(experiment.lines(document))
    assert "no race showed" in said
    assert "nothing" not in said
    assert "2 runs of match, 1 relaunch, about 1:05" in said
    assert "verdict: found: batch invariance (condition 1) · probable" in said


def test_a_floor_is_printed_with_what_comes_first():
    proposal = {
        "threshold": 2e-6, "zero": False, "false_alarm_rate": 0.25,
        "sentence": "the largest", "first": "mend it",
    }  # fmt: skip
    helper = {
        "averages": [1e-6, 2e-6], "statuses": ["diverged"] * 2, "proposal": proposal,
        "prefill_against_prefill": {"differing": 0}, "decode_against_decode": {"differing": 3},
    }  # fmt: skip
    missing = {"averages": [], "statuses": ["not_run"] * 2, "proposal": None, "reason": "radix cache off"}
    document = {"session": "/s", "helpers": {"match": helper, "prefill_cache_hit": missing}}
    said = "\n".join(calibrate.lines(document))
    assert "3 differ" in said
    assert "first: mend it" in said
    assert "25%" in said
    assert "prefill_cache_hit: radix cache off" in said


def test_an_emitted_name_is_an_identifier():
    from klbench.cli.emit_test import _word

    for label in ("demo-dense", "Qwen3-8B", "../x y", ""):
        ast.parse(f"test_{_word(label)}_kl = 1")
