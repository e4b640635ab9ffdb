"""The runner and the table of the GPU list, with rows that write what they are told to."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from klbench.core.columns import HELPERS
from tests.gpu import rows as listed
from tests.gpu import table
from tests.gpu.judgement import RIGHT, in_words, undecided, wrong
from tests.gpu.rows import Place, Row
from tests.gpu.run import Runner, judged

COMMIT = "0123456789abcdef"


def row(name: str, *, program: str = "", **more: Any) -> Row:
    """A row whose one command notes its port, GPUs and order in the folder above, and writes `run.json`."""
    write = (
        "import json, os, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "with open(folder.parent / 'order', 'a') as order:\n"
        "    order.write(f'{sys.argv[2]} {sys.argv[3]} {os.environ[\"CUDA_VISIBLE_DEVICES\"]}\\n')\n"
        "(folder / 'run.json').write_text(json.dumps({'value': 7}))\n"
    )

    def commands(place: Place) -> list[list[str]]:
        return [[sys.executable, "-c", write + program, str(place.folder), name, str(place.port)]]

    return Row(
        name,
        1,
        (),
        f"what {name} does",
        commands,
        lambda documents: RIGHT if documents["run"]["value"] == 7 else wrong("not seven"),
        lambda documents: f"value {documents['run']['value']}",
        **more,
    )


def run(out: Path, *rows: Row, commit: str = COMMIT, deadline_s: float = 60.0, at_once: int = 2) -> list[Any]:
    out.mkdir(exist_ok=True)
    runner = Runner(out, out / "models", deadline_s, at_once, gpus=2, commit=commit)
    asyncio.run(runner.run(rows))
    results: list[Any] = json.loads((out / "rows.json").read_text())
    return results


def order(out: Path) -> list[list[str]]:
    return [line.split() for line in (out / "order").read_text().splitlines()]


def test_rows_share_the_places_and_those_that_measure_time_come_last(tmp_path: Path) -> None:
    alone = row("alone", alone=True)
    results = run(tmp_path, alone, row("a"), row("b"), row("c"), row("both", gpus=2))
    assert {result["name"]: result["answer"] for result in results} == dict.fromkeys(
        ("alone", "a", "b", "c", "both"), "right"
    )
    made = order(tmp_path)
    assert made[-1][0] == "alone"
    assert {port for _, port, _ in made} <= {"10000", "11100"}
    gpus = {name: seen for name, _, seen in made}
    assert gpus["both"] == "0,1"
    assert all(gpus[name] in ("0", "1") for name in ("a", "b", "c"))


def test_a_row_is_made_once_for_each_commit(tmp_path: Path) -> None:
    run(tmp_path, row("a"))
    run(tmp_path, row("a"), row("b"))
    assert [name for name, *_ in order(tmp_path)] == ["a", "b"]
    (left,) = run(tmp_path, row("a"), commit="fedcba")
    assert [name for name, *_ in order(tmp_path)] == ["a", "b", "a"]
    assert left["commit"] == "fedcba"


def test_a_row_that_the_deadline_cuts_says_so_and_is_made_again(tmp_path: Path) -> None:
    slow = row("slow", program="import signal; signal.pause()")
    (cut,) = run(tmp_path, slow, deadline_s=0.0)
    assert (cut["answer"], cut["said"]) == ("not_run", "the time was up")
    assert not (tmp_path / "slow" / "row.json").exists()
    (made,) = run(tmp_path, row("slow"))
    assert made["answer"] == "right"


def test_an_answer_is_judged_by_its_documents(tmp_path: Path) -> None:
    seven = row("seven")
    assert judged(seven, tmp_path)["answer"] == "not_run"
    place = tmp_path / "run.json"
    place.write_text(json.dumps({"value": 8}))
    found = {"answer": "wrong", "said": "value 8", "wrong": ["not seven"], "undecided": []}
    assert judged(seven, tmp_path) == found
    assert in_words(found) == "value 8; NOT not seven"
    unsure = replace(seven, check=lambda _: undecided("whether it is eight"))
    assert judged(unsure, tmp_path)["answer"] == "undecided"
    assert in_words(judged(unsure, tmp_path)) == "value 8; OPEN whether it is eight"
    place.write_text(json.dumps({"other": 8}))
    assert judged(seven, tmp_path)["answer"] == "wrong"
    place.write_text(json.dumps({"error": {"what": "no server", "why": "it ended"}}))
    assert judged(seven, tmp_path)["said"] == "no server: it ended"
    assert judged(seven, tmp_path)["answer"] == "not_run"


SERVER = {"gpus": ["NVIDIA H200"], "driver": "580", "sglang_version": "0.5.17", "torch": "2.11.0"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results; the list is three of its rows."""
    dense, swa, cost = (
        next(one for one in listed.ROWS if one.name == name) for name in ("dense-page64", "swa", "cost")
    )
    swa = replace(swa, check=lambda _: RIGHT, says=lambda _: "an | operator")
    monkeypatch.setattr(table, "ROWS", (dense, swa, cost))
    helper = {"status": "clean", "divergent_tokens": 0, "tokens": 64}
    run_document = {"helpers": dict.fromkeys(HELPERS, helper), "verdict": {"status": "none"}}
    _result(tmp_path / "dense-page64", "run", run_document)
    _result(tmp_path / "swa", "locate", {"server": SERVER, "findings": []})
    return tmp_path


def _result(folder: Path, stem: str, document: dict[str, Any], commit: str = COMMIT) -> None:
    folder.mkdir()
    (folder / f"{stem}.json").write_text(json.dumps(document))
    (folder / "row.json").write_text(json.dumps({"commit": commit}))


def _table(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["table", str(folder), "--date", "2026-11-30"])
    table.main()
    return capsys.readouterr().out


def test_the_table_has_each_row_and_what_it_was_made_on(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _table(results, monkeypatch, capsys)
    assert "NVIDIA H200, driver 580, sglang 0.5.17, torch 2.11.0; klbench 0123456 for all rows." in text
    assert "| right | match clean, 0 of 64 differ; prefill_cache_hit clean, 0 of 64 differ; " in text
    assert "| right | an or operator |" in text
    assert text.splitlines()[-1].endswith("| not run |  |")


def test_rows_of_several_commits_are_told_apart(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "swa" / "row.json").unlink()
    text = _table(results, monkeypatch, capsys)
    assert "klbench 0123456 for dense-page64; of an unknown commit for swa." in text
