"""A test file made of a session: it passes on what was measured, or it is not written."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from klbench.cli.headless import Plan, execute
from klbench.errors import UndecidedError
from klbench.session import emitting
from klbench.session.calibrating import kept_calibration
from klbench.session.emitting import write_test
from klbench.session.request import Options, StartRequest, Target
from tests.session.fake_engine import PROMPTS, FakeBench

START = StartRequest(target=Target(kind="demo", model="dense"), options=Options(samples=3, max_new_tokens=6))


pytestmark = pytest.mark.usefixtures("places")


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A session of three passes that differ by the same bits in each, and what calibrate says of them."""
    session, place = tmp_path / "session", tmp_path / "calibrated.json"
    plan = Plan("calibrate", passes=3)
    execute(START, plan, session=session, json_place=str(place), make_work=FakeBench)
    return session, json.loads(place.read_text())


def threshold_of(file: Path) -> float:
    values = [
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "kl_div_thres"
    ]
    (value,) = values
    return float(ast.literal_eval(value))


def test_what_was_calibrated_passes_the_test_that_is_written(
    tmp_path: Path, measured: tuple[Path, dict[str, Any]]
) -> None:
    session, calibrated = measured
    averages = [helper["averages"] for helper in calibrated["helpers"].values()]
    assert all(one == passes[0] > 0 for passes in averages for one in passes)

    file, prompts = write_test(session, START, tmp_path / "test_tiny_kl.py")

    # sglang.test.kl_test_utils: assert avg_kl_div < threshold
    assert all(one < threshold_of(file) for passes in averages for one in passes)
    assert json.loads(prompts.read_text()) == [list(prompt) for prompt in PROMPTS]
    comment = " ".join(file.read_text().replace("# ", "").split())
    assert "3 passes are the same bit for bit, so they are one observation" in comment


def test_no_test_is_written_that_fails_on_the_run_it_is_made_of(
    tmp_path: Path, measured: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, calibrated = measured
    kept = kept_calibration(calibrated["server"])
    assert kept is not None
    for proposal in kept["proposals"].values():
        proposal["threshold"] = calibrated["helpers"]["match"]["averages"][0]
    monkeypatch.setattr(emitting, "kept_calibration", lambda _server: kept)

    with pytest.raises(UndecidedError, match="it would fail on the run that was just measured") as raised:
        write_test(session, START, tmp_path / "test_tiny_kl.py")

    assert "match averages" in raised.value.why
    assert not (tmp_path / "test_tiny_kl.py").exists()
