"""`klbench census`: the table, the document, the exit code."""

import functools
import json
from dataclasses import replace

import pytest

from klbench.cli.census import lines
from klbench.cli.headless import Plan, execute
from klbench.core.census import Damage, OperatorReplay, census_body
from klbench.errors import ExitCode, UndecidedError
from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.session.reading import read_state
from klbench.session.request import Options, StartRequest, Target
from tests.session.scripted import ScriptedWork

START = StartRequest(target=Target(kind="demo", model="dense"), options=Options())
GOOD = OperatorReplay(
    module="model.layers.0.mlp.act_fn",
    call=0,
    class_name="SiluAndMul",
    order=1,
    rank=0,
    status="invariant",
    reason="",
    total=61,
    tried=(1, 2, 61),
    judged=(0,),
    variants=((0, 0, 0),),
)
BAD = replace(
    GOOD,
    module="model.layers.1.self_attn.o_proj",
    status="not_invariant",
    variants=((0, 0, 1),),
    damage=Damage(3, 40, 128, 0, "scattered", "0"),
)
STATEFUL = replace(
    GOOD, module="model.layers.0.self_attn.attn", status="stateful", reason="it reads the K/V", tried=()
)
UNCUT = replace(GOOD, module="model.visual", status="skipped", reason="no rows", tried=(), variants=())


class CensusWork(ScriptedWork):
    def __init__(self, session, operators=(), fails=False):
        super().__init__(session)
        self.operators = operators
        self.fails = fails

    async def census(self, job, _relaunch):
        await self.launch(job)
        job.progress("replaying operators", 1, 2)
        if self.fails:
            raise UndecidedError("no operator could be replayed", why="none has rows")
        self.session.emit(ev.CensusTaken(census=1, result=census_body(self.operators), elapsed_s=0.5))


pytestmark = pytest.mark.usefixtures("places")


def census(tmp_path, *operators, fails=False):
    """The exit code and the JSON document of one census."""
    place = tmp_path / "result.json"
    code = execute(
        START,
        Plan("census"),
        session=tmp_path / "session",
        json_place=str(place),
        make_work=functools.partial(CensusWork, operators=operators, fails=fails),
    )
    return code, json.loads(place.read_text())


@pytest.mark.parametrize(
    ("operators", "code"),
    [
        ([GOOD, STATEFUL], ExitCode.CONSISTENT),
        ([GOOD, BAD], ExitCode.DIVERGED),
        ([GOOD, BAD, UNCUT], ExitCode.DIVERGED),
        ([GOOD, UNCUT], ExitCode.UNDECIDED),
        ([GOOD, replace(UNCUT, status="not_repeatable")], ExitCode.UNDECIDED),
        ([GOOD, replace(UNCUT, status="error")], ExitCode.UNDECIDED),
        ([STATEFUL], ExitCode.UNDECIDED),
    ],
)
def test_the_exit_code_says_whether_an_operator_changes_and_whether_all_were_judged(
    tmp_path, operators, code
):
    assert census(tmp_path, *operators)[0] == code


def test_the_document_is_klbench_census_1_and_stays_in_the_session(tmp_path):
    _, document = census(tmp_path, GOOD, BAD)
    assert document["schema"] == "klbench.census/1"
    assert document["server"]["sglang_version"] == "0.5.23"
    assert [entry["module"] for entry in document["operators"]] == [BAD.module, GOOD.module]
    assert document["operators"][0]["first_M"] == 61
    assert "error" not in document
    state = read_state(SessionFolder(tmp_path / "session"))
    assert state.latest_census.result["summary"]["not_invariant"] == 1


def test_a_census_that_failed_gives_5_and_a_document_with_the_error(tmp_path):
    code, document = census(tmp_path, fails=True)
    assert code == ExitCode.UNDECIDED
    assert document["error"]["what"] == "no operator could be replayed"
    assert document["operators"] == []


def test_the_table_shows_where_each_operator_changes_and_counts_the_rest():
    document = {"session": "/s", **census_body([GOOD, BAD, STATEFUL, UNCUT])}
    shown = lines(document)
    assert shown[0].split() == ["operator", "class", "1", "2", "61", "first", "M", "max", "ulps"]
    assert shown[1].split() == [BAD.module, "SiluAndMul", "·", "·", "≠", "61", "3"]
    assert "1 others keep their bits with 1 to 61 rows" in shown
    assert "1 not called again: no rows (model.visual)" in shown
    assert any(line.startswith("1 not called again, for they have a state: it reads") for line in shown)
    assert not any(GOOD.module in line for line in shown)
    assert any(GOOD.module in line for line in lines(document, show_all=True))


def test_a_narrow_terminal_gets_marks_side_by_side_and_the_end_of_long_names():
    long = replace(
        BAD, module=f"model.language_model.{'very.' * 12}mlp.experts.gate_up_proj", tried=(1, 2, 61)
    )
    document = {"session": "/s", **census_body([BAD, long, STATEFUL])}
    assert max(map(len, lines(document))) > 80

    shown = lines(document, width=80)

    assert max(map(len, shown[:-1])) <= 80
    assert shown[0] == "M: 1 2 61"
    assert shown[1].split() == ["operator", "by", "M", "first", "M", "max", "ulps"]
    assert [line.split()[1:] for line in shown[2:4]] == [["··≠", "61", "3"]] * 2
    (cut,) = [line for line in shown if line.startswith("…")]
    assert cut.split()[0].endswith("mlp.experts.gate_up_proj")


def test_what_was_not_tried_by_an_operator_leaves_its_place_empty():
    less = replace(BAD, module="a" * 60, tried=(1, 61), variants=((0, 1),))
    shown = lines({"session": "/s", **census_body([less, BAD])}, width=70)
    assert any(line.endswith("· ≠   61       3") for line in shown)


def test_columns_of_the_environment_are_the_terminals(monkeypatch):
    document = {"session": "/s", **census_body([replace(BAD, module="m" * 70)])}
    monkeypatch.setenv("COLUMNS", "60")
    assert lines(document)[0] == "M: 1 2 61"
    monkeypatch.delenv("COLUMNS")
    assert lines(document)[0].startswith("operator")
