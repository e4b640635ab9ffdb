"""Two sessions side by side: what differs, in which direction, and what must not be compared."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from klbench.cli import main
from klbench.cli.headless import Plan, execute
from klbench.errors import ExitCode, UndecidedError
from klbench.session import events as ev
from klbench.session.comparing import check_comparable, code_change, differing, side_of
from klbench.session.folder import SessionFolder
from klbench.session.liking import check_then, start_like
from klbench.session.log import EventLog, read_log
from klbench.session.reading import read_state
from klbench.session.snapshot import CodeState
from tests.session.fake_engine import FakeBench
from tests.session.test_continuing import START

pytestmark = pytest.mark.usefixtures("places")


class Fixed(FakeBench):
    """The same server with its decode repaired."""

    def __init__(self, session):
        super().__init__(session, commit="b" * 40)
        generate = self.fake.client.generate

        async def repaired(*arguments, **how):
            answers = await generate(*arguments, **how)
            for answer in answers:
                answer.output_logprobs.nats[:] = [np.float32(-token / 7) for token in answer.output_ids]
            return answers

        self.fake.client.generate = repaired


def session(path, make_work=FakeBench):
    execute(START, Plan("run"), session=path, json_place=None, make_work=make_work)
    return SessionFolder(path)


def compared(capsys, *arguments):
    capsys.readouterr()
    code = main(["compare", *map(str, arguments), "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_a_session_does_not_differ_from_a_repetition(tmp_path, capsys):
    one, two = session(tmp_path / "one"), session(tmp_path / "two")
    code, document = compared(capsys, one.path, two.path)
    assert (code, document["differs"], document["verdict"]) == (ExitCode.CONSISTENT, False, "same")
    assert document["schema"] == "klbench.compare/1"
    assert document["helpers"]["match"]["change"]["compared"] == 18


def test_what_cannot_be_read_is_no_difference_but_no_answer(tmp_path, capsys):
    one, two = session(tmp_path / "one"), session(tmp_path / "two")
    for file in two.runs.glob("*.npz"):
        file.write_bytes(file.read_bytes()[:100])
    code, document = compared(capsys, one.path, two.path)
    assert (code, document["verdict"]) == (ExitCode.UNDECIDED, "undecided")
    assert "cannot read the columns" in document["helpers"]["match"]["reason"]
    fixed = session(tmp_path / "fixed", Fixed)
    assert compared(capsys, two.path, fixed.path)[0] == ExitCode.DIVERGED  # by what the helpers said


def test_a_fix_makes_it_better_and_names_the_commits(tmp_path, capsys):
    one, two = session(tmp_path / "one"), session(tmp_path / "two", Fixed)
    code, document = compared(capsys, one.path, two.path)
    assert (code, document["verdict"]) == (ExitCode.DIVERGED, "better")
    helper = document["helpers"]["match"]
    assert (helper["before"]["status"], helper["after"]["status"]) == ("diverged", "clean")
    assert (helper["change"]["fixed"], helper["change"]["introduced"]) == (18, 0)
    assert document["differing"]["git_commit"] == ["a" * 40, "b" * 40]
    assert compared(capsys, two.path, one.path)[1]["verdict"] == "worse"
    assert main(["compare", str(one.path), str(two.path)]) == ExitCode.DIVERGED
    shown = capsys.readouterr().out
    assert "better: divergences went, none came" in shown
    assert "18 → 0" in shown


def with_facts(path, **facts):
    """A session whose server had other facts."""
    folder = session(path)
    entries = read_log(folder.events)
    folder.events.unlink()
    with EventLog(folder.events) as log:
        for entry in entries:
            event = entry.event
            if isinstance(event, ev.ServerReady):
                event = ev.ServerReady(server={**event.server, **facts}, url=event.url, launch_s=2.0)
            log.append(event)
    return folder


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        ({"model": "/models/other"}, "model"),
        ({"architectures": ["OtherForCausalLM"]}, "architectures"),
    ],
)
def test_another_experiment_is_refused_by_name_even_if_the_user_insists(tmp_path, capsys, facts, key):
    one, two = session(tmp_path / "one"), with_facts(tmp_path / "two", **facts)
    for more in ((), ("--anyway",)):
        code, document = compared(capsys, one.path, two.path, *more)
        assert code == ExitCode.UNDECIDED
        assert f"cannot be compared: {key} differ" in document["error"]["what"]


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        ({"attention_backend": "triton"}, "attention_backend"),
        ({"gpus": ["NVIDIA H200"]}, "gpus"),
        ({"numerics_env": {"NCCL_ALGO": "Tree"}}, "numerics_env.NCCL_ALGO"),
    ],
    ids=["backend", "gpus", "environment"],
)
def test_other_settings_are_refused_by_name_unless_the_user_insists(tmp_path, capsys, facts, key):
    one, two = session(tmp_path / "one"), with_facts(tmp_path / "two", **facts)
    code, document = compared(capsys, one.path, two.path)
    assert code == ExitCode.UNDECIDED
    assert key in document["error"]["what"]
    code, document = compared(capsys, one.path, two.path, "--anyway")
    assert (code, key in document["differing"]) == (ExitCode.CONSISTENT, True)


def test_other_prompts_are_refused(tmp_path, monkeypatch):
    one = session(tmp_path / "one")
    monkeypatch.setattr("tests.session.fake_engine.PROMPTS", ((1, 2), (3, 4), (5, 6)))
    two = session(tmp_path / "two")
    sides = [side_of(folder, read_state(folder)) for folder in (one, two)]
    with pytest.raises(UndecidedError, match="prompts"):
        check_comparable(differing(*sides), anyway=True)


def test_the_same_model_in_another_place_is_the_same_model(tmp_path):
    one, two = session(tmp_path / "one"), with_facts(tmp_path / "two", model="/elsewhere/tiny")
    sides = [side_of(folder, read_state(folder)) for folder in (one, two)]
    check_comparable(differing(*sides), anyway=False)


def test_a_session_that_measured_nothing_cannot_be_compared(tmp_path, capsys):
    one = session(tmp_path / "one")
    two = SessionFolder(tmp_path / "two")
    execute(START, Plan("run"), session=two.path, json_place=None, make_work=lambda its: _Dead(its))
    code, document = compared(capsys, one.path, two.path)
    assert (code, "holds no measured run" in document["error"]["what"]) == (ExitCode.UNDECIDED, True)


class _Dead(FakeBench):
    async def _ready_server(self, _job):
        raise UndecidedError("no server")


def test_doing_the_same_again_takes_the_recorded_prompts_and_compares(tmp_path, capsys):
    one = session(tmp_path / "one")
    start, side = start_like(one)
    assert start.options.helpers == ("match", "prefill_cache_hit", "decode_cache_hit")
    assert start.options.prompts is None
    place = tmp_path / "again.json"
    code = execute(
        start, Plan("run", like=side), session=tmp_path / "two", json_place=str(place), make_work=Fixed
    )
    assert code == ExitCode.CONSISTENT
    document = json.loads(place.read_text())
    assert document["compare"]["verdict"] == "better"
    assert "better: divergences went" in capsys.readouterr().out


def test_prompts_from_a_file_are_repeated_from_the_session_and_not_from_the_file(tmp_path):
    one = session(tmp_path / "one")
    entries = read_log(one.events)
    one.events.unlink()
    with EventLog(one.events) as log:
        for entry in entries:
            event = entry.event
            if isinstance(event, ev.RunnerStarted):
                options = {**event.options, "prompts": "/gone/prompts.jsonl"}
                event = ev.RunnerStarted(
                    klbench_version="0.1.0", pid=1, host="h", target=event.target, options=options
                )
            log.append(event)
    start, _ = start_like(one)
    assert start.options.prompts.startswith(str(one.runs))
    assert Path(start.options.prompts).read_text().startswith('{"input_ids":[5,6,7]}\n')


def test_a_run_like_another_names_its_target_itself(capsys):
    assert main(["run", "--like", "x", "--demo"]) == ExitCode.USAGE
    assert "--like names the target itself" in capsys.readouterr().err


@pytest.fixture
def repository(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


async def test_edits_of_the_same_commit_are_named_by_file(repository):
    before = CodeState(str(repository), "a" * 40, "s", {"norm.py": "1", "same.py": "7"})
    after = CodeState(str(repository), "a" * 40, "s", {"norm.py": "2", "same.py": "7", "new.py": "3"})
    change = await code_change(before, after)
    assert change["changed_files"] == ["new.py", "norm.py"]
    assert await code_change(None, after) is None
    other = CodeState(str(repository), "b" * 40, "s", {})
    assert (await code_change(before, other))["files_known"] is False


@pytest.mark.parametrize(
    ("make_work", "code"), [(FakeBench, ExitCode.CONSISTENT), (Fixed, ExitCode.DIVERGED)]
)
def test_a_session_repeated_says_whether_the_verdict_is_the_same(tmp_path, capsys, make_work, code):
    one = session(tmp_path / "one")
    start, side = start_like(one)
    place = tmp_path / "again.json"
    plan = Plan("run", like=side, same_verdict=True)
    done = execute(start, plan, session=tmp_path / "two", json_place=str(place), make_work=make_work)
    judged = json.loads(place.read_text())["same_verdict"]
    told = capsys.readouterr().out
    assert done == code
    assert judged["same"] is (code == ExitCode.CONSISTENT)
    if judged["same"]:
        assert judged["changes"] == []
        assert "the same verdict as then" in told
    else:
        assert "match: diverged then, clean now" in judged["changes"]
        assert judged["changes"][-1].startswith("verdict: found (")
        assert "another verdict than then\n  match: diverged then, clean now" in told


def test_a_verdict_that_was_settled_since_is_judged_as_the_run_gave_it(tmp_path):
    one = session(tmp_path / "one")
    with EventLog(one.events) as log:
        settled = {"status": "found", "conditions": ["race"], "grade": "confirmed"}
        log.append(ev.RunJudged(run=1, verdict=settled))
    start, side = start_like(one)
    assert side.run.verdict["grade"] == "confirmed"
    plan = Plan("run", like=side, same_verdict=True)
    assert execute(start, plan, session=tmp_path / "two", json_place=None, make_work=FakeBench) == 0


def test_a_repetition_that_measured_nothing_is_no_other_verdict(tmp_path):
    start, side = start_like(session(tmp_path / "one"))
    plan = Plan("run", like=side, same_verdict=True)
    two = tmp_path / "two"
    dead = execute(start, plan, session=two, json_place=None, make_work=lambda its: _Dead(its))
    assert dead == ExitCode.UNDECIDED


def test_the_same_verdict_needs_one_to_compare_with(capsys):
    assert main(["run", "--same-verdict", "--demo"]) == ExitCode.USAGE
    assert "--same-verdict needs --like" in capsys.readouterr().err


def test_a_verdict_to_compare_with_must_have_been_given(tmp_path):
    folder = session(tmp_path / "one")
    _, side = start_like(folder)
    check_then(side, verdict=True)
    helpers = list(side.run.helpers)
    helpers[1] = msgspec.structs.replace(helpers[1], result=None, columns=None, stopped=True)
    stopped = replace(side, run=msgspec.structs.replace(side.run, helpers=tuple(helpers)))

    check_then(stopped, verdict=False)
    with pytest.raises(UndecidedError, match="not measured to its end") as refused:
        check_then(stopped, verdict=True)

    assert "prefill_cache_hit did not end" in refused.value.why


def test_columns_that_cannot_be_read_are_said_before_a_server_is_started(tmp_path, monkeypatch, capsys):
    folder = session(tmp_path / "one")
    _, side = start_like(folder)
    columns = folder.resolve(side.run.helpers[0].columns)
    columns.write_bytes(columns.read_bytes()[:100])
    monkeypatch.setattr("klbench.cli.headless.execute", lambda *_a, **_k: pytest.fail("it began"))

    code = main(["run", "--like", str(folder.path)])

    assert code == ExitCode.UNDECIDED
    assert "nothing can be compared with match" in capsys.readouterr().err
