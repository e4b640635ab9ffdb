"""What can be done with a located origin: its numbers, its folder, a replay; also on a real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from klbench.engine.origin_numbers import origin_numbers
from klbench.engine.raw_tensors import row_tensor, write_raw
from klbench.engine.ulp_rows import ORIGIN_ROWS
from klbench.errors import UndecidedError, UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.bench import Bench
from klbench.session.exporting import export_located, finding_of, new_export_folder, trace_dir_of
from klbench.session.folder import SessionFolder, make_session
from klbench.session.log import Entry
from klbench.session.replayable import check_can_replay
from klbench.session.replaying import _arm_rows, located_to_replay
from klbench.session.request import Options, StartRequest, Target
from klbench.session.runner import Runner
from klbench.session.state import SessionState, fold

O_PROJ = "model.layers.1.self_attn.o_proj"


def rows_of(folder: Path, **pairs: tuple[np.ndarray, np.ndarray]) -> Path:
    """A trace's folder with the rows of finding 0."""
    tensors = {}
    for name, sides in pairs.items():
        for side, row in zip("ab", sides, strict=True):
            tensors[f"0/{name.replace('_', '.', 1)}/{side}"] = row_tensor("float32", row.tobytes())
    write_raw(folder / ORIGIN_ROWS, tensors)
    return folder


def test_numbers_are_those_of_the_finding_outputs_first(tmp_path: Path) -> None:
    same = np.arange(4, dtype=np.float32)
    other = np.array([0, 1, 2.0000002, 3], dtype=np.float32)
    found = origin_numbers(rows_of(tmp_path, in_x=(same, same), out_0=(same, other)), 0)
    assert [rows.name for rows in found] == ["out.0", "in.x"]
    assert (found[0].difference.differing, found[0].difference.max_ulps) == (1, 1)
    assert found[0].elements.b.tolist() == other.tolist()
    with pytest.raises(UndecidedError, match="no rows of this finding"):
        origin_numbers(tmp_path, 3)


def test_rows_that_are_gone_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(UndecidedError) as raised:
        origin_numbers(tmp_path / "trace-1", 0)
    assert "is gone" in raised.value.why
    assert "locate once more" in raised.value.next


def test_a_damaged_file_of_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / ORIGIN_ROWS).write_bytes(b"\xff" * 40)
    with pytest.raises(UndecidedError):
        origin_numbers(tmp_path, 0)


def located(result: dict) -> SessionState:
    event = ev.Located(locate=1, run=1, helper="match", request=0, result=result, elapsed_s=1.0)
    return fold([Entry(1, 0.0, event)])


@pytest.mark.parametrize("result", [{}, {"findings": "x"}, {"findings": [3]}, {"findings": []}])
def test_a_finding_that_is_not_there_is_refused(tmp_path: Path, result: dict) -> None:
    with pytest.raises(UsageError):
        finding_of(located(result).latest_located, 0)
    with pytest.raises(UsageError):
        trace_dir_of(SessionFolder(tmp_path), located(result).latest_located)


def test_only_an_operator_of_its_inputs_alone_can_be_replayed() -> None:
    check_can_replay({"kind": "operator", "module": O_PROJ})
    check_can_replay({"kind": "head", "module": "lm_head"})
    for kind, module in (("state_restore", "attn"), ("gap", "a -> b"), ("head", "sampler")):
        with pytest.raises(UsageError, match="cannot be replayed"):
            check_can_replay({"kind": kind, "module": module})
    with pytest.raises(UsageError, match="nothing was located"):
        located_to_replay(SessionState(), None)


def test_what_the_state_probe_found_has_no_operator_to_replay() -> None:
    finding = {
        "kind": "operator",
        "module": "model.layers.1 -> model.layers.2",
        "evidence": [{"code": "state_probe", "text": "No operator was watched.", "values": {}}],
    }

    with pytest.raises(UsageError, match="no operator to replay"):
        check_can_replay(finding)


def test_a_replay_is_kept_with_its_finding_also_when_the_finding_is_said_again() -> None:
    state = located({"findings": [{"kind": "operator", "module": O_PROJ}]})
    replayed = ev.Replayed(locate=1, finding=0, result={"first_M": 64}, elapsed_s=1.0)
    state = state.apply(Entry(2, 0.0, replayed))
    assert state.latest_located.replays == {0: {"first_M": 64}}
    elsewhere = ev.Replayed(locate=7, finding=0, result={"first_M": 1}, elapsed_s=1.0)
    assert state.apply(Entry(3, 0.0, elsewhere)).latest_located.replays == {0: {"first_M": 64}}


def test_exports_never_overwrite_one_another(tmp_path: Path) -> None:
    assert new_export_folder(tmp_path).name == "origin-1"
    (tmp_path / "origin-1").mkdir()
    assert new_export_folder(tmp_path).name == "origin-2"


class OnDemo(Bench):
    """The session's work on a demo server that is up already, and that outlives it."""

    demo = None

    async def _ready_server(self, _job):
        if self._server is None:
            self._server = self.demo.server()
            facts = self._server.facts.as_dict()
            ready = ev.ServerReady(server=facts, url=self._server.url, launch_s=self._server.launch_s)
            self._session.emit(ready)
        return self._server

    async def close(self) -> None:
        if self._server is not None:
            await self._server.client.close()
            self._server = None


@pytest.mark.parametrize(("kind", "rows"), [("head", [8, 2048]), ("operator", [900, 901])])
def test_the_row_counts_of_the_head_are_those_of_its_own_calls(kind: str, rows: list[int]) -> None:
    fact = {"code": "origin", "values": {"batch_rows": [900, 901], "head_rows": [8, 2048]}}
    assert _arm_rows({"kind": kind, "evidence": [fact]}) == rows


@pytest.mark.server
def test_an_operator_is_located_replayed_exported_and_predicted_on_a_real_server(
    demo_server, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(OnDemo, "demo", demo_server("dense", fault="o_proj-rows:layer=1,rows=64"))
    options = Options(samples=4, max_new_tokens=12, prompt_tokens=110, ready_to_capture=True)
    start = StartRequest(target=Target(kind="demo", model="dense"), options=options)
    folder = make_session(tmp_path / "session", *start.as_shown())

    async def work() -> SessionState:
        async with Runner(folder, start, OnDemo, attended=False) as runner:
            await runner.execute(cmd.Run(helpers=["match"]))
            await runner.execute(cmd.Experiment(names=["pad:prompt_len%8=3", "repeats", "graphs"]))
            await runner.execute(cmd.Locate())
            await runner.execute(cmd.Replay())
            return runner.state

    state = asyncio.run(work())
    made = {one.name: one.result for one in state.experiments}
    assert made["repeats"]["outcome"] == "same_bits"
    assert made["graphs"]["outcome"] == "not_possible"
    # It is the number of rows that matters here, not what is left of a length: all diverge in both passes.
    assert made["pad"]["outcome"] == "refuted"
    assert made["pad"]["values"]["prediction"] == state.experiment_plan["predictions"]["pad"]
    assert made["pad"]["values"]["divergent"] == made["pad"]["values"]["divergent_beside"] == 4

    found = state.latest_located
    finding = finding_of(found, 0)
    assert (finding["kind"], finding["module"]) == ("operator", O_PROJ)
    table = found.replays[0]
    assert (table["status"], table["first_M"]) == ("not_invariant", 64)
    assert set(range(1, 17)) <= set(table["tried_M"])
    assert min(table["changed_M"]) == 64
    assert max(table["arms_M"]) >= 64 > min(table["arms_M"])

    rows = origin_numbers(trace_dir_of(folder, found), 0)
    outputs = [part for part in rows if part.name.startswith("out.")]
    assert max(part.difference.max_ulps for part in outputs) == finding["ulp_max"]
    assert all(not part.difference.differing for part in rows if part.name.startswith("in."))

    done = export_located(folder, found, 0)
    shown = subprocess.run(
        [sys.executable, "show.py"], cwd=done.folder, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()
