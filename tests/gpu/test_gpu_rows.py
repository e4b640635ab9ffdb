"""The GPU list without a GPU: its commands are commands of klbench, its calls make the whole list, and its
checks refuse what they must."""

import asyncio
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from klbench.cli import main
from tests.gpu import clean, probe, truth
from tests.gpu.rows import CALLS, ROWS, Place
from tests.gpu.run import MOST_AT_ONCE, port_of

# Where Linux begins to hand out ports itself.
FIRST_EPHEMERAL_PORT = 32_768


class Parsed(Exception):
    """A program got as far as its work."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, port_of(3), {name: tmp_path / name for row in ROWS for name in row.models})


def commands() -> list[Any]:
    return [pytest.param(row, id=row.name) for row in ROWS]


@pytest.mark.parametrize("row", commands())
def test_each_command_of_a_row_is_understood(
    row: Any, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    def keep(start: Any, *_: Any, **__: Any) -> int:
        begun.append(start.target)
        return 0

    async def stop(arguments: Any, *_: Any) -> None:
        begun.append(arguments)
        raise Parsed

    class Drive:
        def __init__(self, *_: Any, **__: Any) -> None:
            begun.append(None)
            raise Parsed

    monkeypatch.setattr("klbench.cli.headless.execute", keep)
    monkeypatch.setattr("klbench.session.selftest.drive.Drive", Drive)
    monkeypatch.setattr(clean, "check", stop)
    monkeypatch.setattr(probe, "probe", stop)
    for command in row.commands(place):
        assert command[:2] == ["python3", "-m"]
        program, *arguments = command[2:]
        monkeypatch.setattr("sys.argv", [program, *arguments])
        if program != "klbench":
            with pytest.raises(Parsed):
                {"tests.gpu.clean": clean, "tests.gpu.probe": probe}[program].main()
            assert begun[-1].flags[:2] == ["--mem-fraction-static", "0.6"]
        elif arguments[0] == "selftest":
            main(arguments)
            assert begun[-1] is None
        elif arguments[0] == "report":
            # Of a session that the row has not made here.
            assert main(arguments) == 2
            assert "no session" in capsys.readouterr().err
        else:
            assert main(arguments) == 0
            assert begun[-1].arguments[:2] == ("--mem-fraction-static", "0.6")
    assert begun


def test_the_calls_together_make_each_row_once() -> None:
    named = [name for call in CALLS for name in call]
    assert sorted(named) == sorted(row.name for row in ROWS)
    alone = {row.name for row in ROWS if row.alone}
    assert all(alone >= set(call) or not alone & set(call) for call in CALLS)


def test_servers_side_by_side_have_ports_of_their_own_below_the_systems() -> None:
    ports = [port_of(place) for place in range(MOST_AT_ONCE)]
    assert all(later - port > 1_000 for port, later in itertools.pairwise(ports))
    assert ports[-1] + 1_000 < FIRST_EPHEMERAL_PORT


# What must be true.

HELPER = {"status": "clean", "divergent_tokens": 0, "tokens": 4096, "all_s": [1.0, 1.2, 1.1]}


def capture(backend: str, size_bytes: int, **more: Any) -> dict[str, Any]:
    made = {"helper": "match", "backend": backend, "bytes": size_bytes, "files": 3, "capture_s": 2.4}
    return made | {"changed_logprobs": 0, "compared_logprobs": 512, "findings": []} | more


def clean_document(**changed: Any) -> dict[str, Any]:
    stock = [{"match": {"elapsed_s": second}} for second in (1.0, 1.1, 3.0)]
    document = {
        "finished": True,
        "clean": True,
        "helpers": {"match": dict(HELPER)},
        "captures": [capture("digest", 7_500_000), capture("dumper", 13_953_000_000)],
        "stock": stock,
        "errors": [],
    }
    return {"clean": document | changed}


def test_costs_are_right_where_both_back_ends_and_both_kinds_of_helpers_ran() -> None:
    documents = clean_document()
    assert truth.cost_is_known(documents) == []
    said = truth.says_cost(documents)
    assert "digest 2.4 s, 7.5 MB in 3 files" in said
    assert "match 1.10 s, sglang's own 1.10 s (1.00x)" in said


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"finished": False}, "cut before its end"),
        ({"captures": [capture("digest", 7_500_000)]}, "not both back ends"),
        ({"captures": [capture("digest", 100), capture("dumper", 20_000)]}, "1/200"),
        ({"stock": []}, "sglang's own helpers did not run"),
        ({"clean": False, "helpers": {"match": HELPER | {"divergent_tokens": 3}}}, "match clean, 3 differ"),
        (
            {"clean": False, "captures": [capture("digest", 1, changed_logprobs=2)]},
            "capture of match: 2 changed",
        ),
    ],
)
def test_costs_of_less_than_all_are_not_right(changed: dict[str, Any], wrong: str) -> None:
    documents = clean_document(**changed)
    assert any(wrong in one for one in truth.cost_is_known(documents))
    truth.says_cost(documents)


def located(**changed: Any) -> dict[str, Any]:
    finding = {
        "kind": "operator",
        "kinds": ["operator"],
        "module": "model.layers.0.self_attn.attn",
        "layer": 0,
        "phase": "decode",
        "positions": {"first": 96, "count": 1},
        "grade": "confirmed",
        "latent": False,
        "evidence": [],
    }
    verdict = {"conditions": ["batch_invariance"], "evidence": [{"code": "tile", "text": "a tile"}]}
    document = {"findings": [finding | changed], "verdict": verdict, "capture": {"changed_logprobs": 0}}
    return {"locate": document | {"statuses": {"match": "diverged"}}}


def test_the_fp8_truth_is_the_tile_edge_in_the_attention_of_layer_0() -> None:
    assert truth.tile_edge(located()) == []
    assert "operator model.layers.0.self_attn.attn at decode row 96" in truth.says_located(located())


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"module": "model.layers.1.self_attn.attn"}, "origin operator model.layers.1"),
        ({"kind": "gap"}, "origin gap"),
        ({"positions": {"first": 97, "count": 1}}, "first row 97, not 96"),
        ({"kinds": ["operator", "state_restore"]}, "the restore is accused"),
        ({"latent": True}, "origin None"),
    ],
)
def test_another_answer_on_fp8_is_wrong(changed: dict[str, Any], wrong: str) -> None:
    assert any(wrong in one for one in truth.tile_edge(located(**changed)))


def test_a_capture_that_changes_logprobs_or_another_condition_is_wrong() -> None:
    documents = located()
    documents["locate"]["capture"]["changed_logprobs"] = 4
    documents["locate"]["verdict"]["conditions"] = ["different_function"]
    assert len(truth.attention_of_layer_0(documents)) == 2
    assert truth.has_an_origin(documents) == ["conditions ['different_function']"]
    assert truth.not_the_restore(documents) == ["capture changed 4 logprobs"]
    assert truth.not_the_restore(located(kinds=["operator", "state_restore"]))


PLANTED = {
    "fault": "slot-reuse",
    "answer": "wrong",
    "marks": {
        "condition": "undecided",
        "helpers": "right",
        "operator": "wrong",
        "layer": "right",
        "position": "right",
        "kind": "right",
    },
    "why": "the condition may be batch_invariance and different_function; it is different_function; "
    "accused too: operator model.layers.0.self_attn.attn at 199, operator model.layers.2.self_attn.attn at 7",
    "located": [],
}


def selftest(*entries: dict[str, Any], planned: int | None = None) -> dict[str, Any]:
    cases = [dict(entry) for entry in entries]
    return {"selftest": {"cases": cases, "clean": [], "planned": planned or len(cases)}}


def test_beside_the_window_kernel_attention_may_be_named_too_and_nothing_else() -> None:
    right = {"fault": "restore-key", "answer": "right", "marks": {}, "why": "", "located": []}
    documents = selftest(right, PLANTED)
    assert truth.all_right_beside_the_window_kernel(documents) == []
    assert truth.all_right(documents) == ["slot-reuse wrong"]
    for change in (
        {"why": PLANTED["why"].replace("layers.2.self_attn.attn", "layers.2.mlp.down_proj")},
        {"why": PLANTED["why"].replace("operator model.layers.2", "state_restore model.layers.2")},
        {"why": "match is not clean after the fault was disarmed; "},
        {"marks": PLANTED["marks"] | {"position": "wrong"}},
        {"marks": PLANTED["marks"] | {"condition": "wrong"}},
        {"answer": "did_not_fire"},
        {"answer": "error"},
    ):
        case = copy.deepcopy(PLANTED) | change
        assert truth.all_right_beside_the_window_kernel(selftest(case)) == [f"slot-reuse {case['answer']}"]


def test_a_fault_that_cannot_fire_and_did_not_is_as_it_must_be() -> None:
    silent = {"fault": "router-rows", "answer": "did_not_fire"}
    assert truth.all_right(selftest(silent | {"cannot_fire": True})) == []
    assert truth.all_right(selftest(silent | {"cannot_fire": False})) == ["router-rows did_not_fire"]


def test_a_selftest_that_was_cut_or_accuses_a_clean_server_is_not_right() -> None:
    right = {"fault": "restore-key", "answer": "right"}
    assert truth.all_right(selftest(right, planned=3)) == ["2 were not judged"]
    documents = selftest(right)
    documents["selftest"]["clean"].append({"fault": "none", "answer": "wrong"})
    documents["selftest"]["planned"] = 2
    assert truth.all_right(documents) == ["none wrong"]


def test_a_run_is_clean_only_with_no_divergence_at_all() -> None:
    document = {"helpers": {"match": dict(HELPER)}, "verdict": {"status": "none"}}
    assert truth.run_is_clean({"run": document}) == []
    document["helpers"]["match"]["status"] = "not_run"
    document["verdict"]["status"] = "undecided"
    assert truth.run_is_clean({"run": document}) == ["match is not_run, 0 differ", "verdict undecided"]


def test_a_check_of_a_clean_server_is_on_disk_after_each_step() -> None:
    """What a call that is cut has measured is not lost, and does not read as finished."""
    writes: list[dict[str, Any]] = []

    class Made:
        def __init__(self) -> None:
            self.document = {"helpers": {name: {"status": "clean"} for name in clean.HELPERS}}

        async def step(self, *_: Any) -> None:
            writes.append({})

        helpers = capture = stock = step

        def write(self, *, finished: bool = False) -> None:
            writes[-1] = {"finished": finished}

    arguments = clean.arguments_of(["m", "--capture", "match", "--dumper", "--stock"])
    asyncio.run(clean.steps(Made(), arguments))  # type: ignore[arg-type]
    assert [write.get("finished") for write in writes] == [False, False, False, True]
