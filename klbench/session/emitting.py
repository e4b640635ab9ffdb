"""Writes the sglang test file of a session's latest run: the threshold that was measured, and its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from klbench.core.columns import HELPERS
from klbench.core.thresholds import SGLANG_GATE_NATS
from klbench.engine.emit_test import PROMPTS_SUFFIX, KlCase, test_file
from klbench.errors import UndecidedError
from klbench.session.calibrating import kept_calibration
from klbench.session.continuing import recorded_prompts
from klbench.session.documents import iso_time
from klbench.session.folder import find_session
from klbench.session.reading import read_state
from klbench.session.request import StartRequest
from klbench.session.state import RunState

_MARGIN_S = 60.0


def write_test(session: Path, start: StartRequest, file: Path) -> tuple[Path, Path]:
    """Writes the test and its prompts; returns both. Raises UndecidedError where no threshold is honest."""
    folder = find_session(str(session))
    state = read_state(folder)
    run = state.run
    if run is None:
        raise UndecidedError("nothing was measured, so there is nothing to test for")
    server = dict((run.server or state.server).facts)
    threshold, sentence = _threshold(run, server)
    prompts = recorded_prompts(folder, run)
    if prompts is None:
        raise UndecidedError("the prompts of the run were not kept", next="measure again")
    took_s = state.server.launch_s or 0.0
    case = KlCase(
        model=str(server.get("model") or start.target.model_path),
        arguments=start.target.arguments,
        deterministic=start.options.deterministic,
        threshold_nats=threshold,
        threshold_sentence=sentence,
        averages={name: _average(run, name) for name in HELPERS},
        samples=len(prompts.prompts),
        max_new_tokens=start.options.max_new_tokens,
        prompts=run.prompts,
        server=server,
        measured_at=iso_time(run.started_at),
        est_time_s=int(took_s + (run.elapsed_s or 0.0) + _MARGIN_S),
        test_file_stem=file.stem,
        demo=start.target.kind == "demo",
    )
    beside = file.with_name(file.stem + PROMPTS_SUFFIX)
    beside.write_text(json.dumps(prompts.as_lists()), encoding="utf-8")
    file.write_text(test_file(case), encoding="utf-8")
    return file, beside


def _average(run: RunState, name: str) -> float | None:
    helper = run.helper(name)
    average = helper.result.get("avg_kl_div") if helper is not None and helper.result else None
    return average if isinstance(average, float | int) else None


def _threshold(run: RunState, server: dict[str, Any]) -> tuple[float, str]:
    """(threshold in nats, the sentence that it rests on)."""
    unanswered = [h.helper for h in run.helpers if h.status not in ("clean", "diverged")]
    if unanswered or len(run.helpers) < len(HELPERS):
        raise UndecidedError(
            "no test is written: not every helper has an answer",
            why=", ".join(f"{h.helper} {h.status}" for h in run.helpers),
            next="mend that first: a test of a helper that hits nothing passes for ever",
        )
    if all(_average(run, name) == 0.0 for name in HELPERS):
        return SGLANG_GATE_NATS, "all three helpers measure exactly 0, so the gate is sglang's own 1e-9"
    kept = kept_calibration(server)
    proposals = [p for p in (kept or {}).get("proposals", {}).values() if p and p.get("threshold")]
    if kept is None or not proposals:
        raise UndecidedError(
            "no test is written: the path does not measure zero and its floor is unknown",
            why=", ".join(f"{name} {_average(run, name)}" for name in HELPERS),
            next="klbench locate names the origin; klbench calibrate measures the floor",
        )
    worst = max(proposals, key=lambda proposal: float(proposal["threshold"]))
    averages = {name: average for name in HELPERS if (average := _average(run, name)) is not None}
    if past := [name for name, average in averages.items() if not average < float(worst["threshold"])]:
        raise UndecidedError(
            "no test is written: it would fail on the run that was just measured",
            why=f"the calibrated threshold is {worst['threshold']:g}, and "
            + ", ".join(f"{name} averages {averages[name]:g}" for name in past),
            next="measure the floor with these prompts: klbench calibrate; or locate the origin",
        )
    first = f"; first: {worst['first']}" if worst.get("first") else ""
    return float(worst["threshold"]), f"{worst['sentence']} (calibrated {kept.get('at')}){first}"
