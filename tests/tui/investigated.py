"""A session that went further than `recorded.finished`: hypotheses, experiments, an operator's replay."""

from pathlib import Path

import numpy as np
import recorded

from klbench.core.columns import HelperColumns
from klbench.core.diagnosis import diagnose
from klbench.core.kl import helper_result
from klbench.engine.raw_tensors import row_tensor, write_raw
from klbench.engine.ulp_rows import ORIGIN_ROWS
from klbench.session import events as ev
from klbench.session.columns import save_columns

HELPER = "prefill_cache_hit"
SAMPLES = 96
"""So many that the residue of the divergent requests is striking."""


def experiment(name: str, outcome: str, text: str, **values) -> dict:
    return {
        "name": name,
        "outcome": outcome,
        "text": text,
        "values": values,
        "meaning": f"meaning of {outcome}",
    }


MADE = (
    experiment("repeats", "same_bits", "5 repeats with equal batches are bit-identical", compared=5),
    experiment("graphs", "not_possible", "not possible here: a CPU server replays no CUDA graphs"),
    experiment("pad", "predicted", "padded to cached tokens = 3 mod 8 32 of 32 diverge: as predicted",
               prediction="padded to cached tokens = 3 mod 8 every request diverges"),
    experiment("page_size", "moved", "with --page-size 16 the divergence moves [/x]\x1b[31m"),
)  # fmt: skip

REPLAY = {
    "module": "model.layers.1.self_attn.o_proj", "status": "not_invariant", "reason": None,
    "first_M": 64, "tried_M": [1, 2, 3, 4, 8, 16, 32, 64, 127], "changed_M": [64, 127],
    "ulp_max": 22, "arms_M": [16, 4096],
}  # fmt: skip


def census() -> dict:
    """Three operators: one that depends on the row count, one that does not, one that has a state."""

    def operator(module: str, status: str, changed: list[int], ulps: int | None, reason: str | None) -> dict:
        return {
            "module": f"model.layers.1.{module}", "call": 0, "layer": 1, "class": "Linear", "rank": 0,
            "status": status, "reason": reason, "first_M": min(changed, default=None), "changed_M": changed,
            "tried_M": REPLAY["tried_M"] if reason is None else [], "ulp_max": ulps,
        }  # fmt: skip

    return {
        "rows": 127,
        "tried_M": REPLAY["tried_M"],
        "summary": {"not_invariant": 1, "invariant": 1, "stateful": 1},
        "operators": [
            operator("self_attn.o_proj", "not_invariant", [64, 127], 22, None),
            operator("mlp.down_proj [/x]", "invariant", [], None, None),
            operator("self_attn.attn", "stateful", [], None, "it reads the K/V of earlier rows"),
        ],
    }


def operator_finding(request: int) -> dict:
    """A second finding, of an operator that was replayed with the confirmation."""
    replayed = {"code": "replay_changes", "text": "Called again alone ...", "values": dict(REPLAY)}
    return {
        "kind": "operator", "kinds": ["operator"], "module": "model.layers.2.mlp.down_proj", "layer": 2,
        "request": request, "helper": HELPER, "arm": "generation", "rank": 0, "phase": "decode",
        "positions": {"first": 270, "count": 9}, "grade": "confirmed", "ulp_max": 22, "replay_M": 64,
        "latent": False,
        "evidence": [
            {"code": "origin", "text": "At position 270 its inputs are equal.", "values": {}}, replayed,
        ],
    }  # fmt: skip


def columns() -> dict:
    """By helper; what differs in the two that hit the cache has cached tokens = 3 mod 8."""
    return {
        name: recorded.columns(name, dirty=name != "match", samples=SAMPLES, new=32)
        for name in recorded.HELPERS
    }


def verdict() -> dict:
    """What the diagnosis says of those columns."""
    measured = columns()
    results = {name: helper_result(part) for name, part in measured.items()}
    return diagnose(results, measured, recorded.FACTS)


def run_helper(recorder: recorded.Recorder, measured: HelperColumns) -> None:
    """One helper, from its end to its columns."""
    file = f"runs/1-{measured.helper}.npz"
    save_columns(recorder.folder / file, measured)
    ended = {"helper": measured.helper, "result": helper_result(measured), "columns": file, "elapsed_s": 4.2}
    recorder.add(ev.HelperEnded(run=1, **ended))


def investigated(folder: Path) -> Path:
    """Measured, judged, experimented on, located, replayed, ended."""
    recorder = _investigate(folder)
    recorder.add(ev.ServerEnded(expected=True, exit_code=0, why="stopped", last_lines=[]))
    recorder.add(ev.RunnerEnded(reason="the user stopped it"))
    return folder


def at_work(folder: Path) -> Path:
    """The same with its server up, and with the rows that its capture kept: what can be done, can be done
    here."""
    _investigate(folder, trace_dir=folder / "traces" / "1")
    return folder


def keep_rows(trace_dir: Path) -> None:
    """Both arms' rows of the first finding: two arguments with the same bits, an output that differs."""
    trace_dir.mkdir(parents=True)
    row = np.cos(np.arange(128, dtype=np.float32))
    other = row.copy()
    other[40:72] *= 1 + np.float32(2**-20)
    given = {"in.0": (row, row), "in.1": (row[:64], row[:64]), "out.0": (row, other)}
    rows = {
        f"0/{name}/{side}": row_tensor("float32", values.tobytes())
        for name, pair in given.items()
        for side, values in zip("ab", pair, strict=True)
    }
    write_raw(trace_dir / ORIGIN_ROWS, rows)


def _investigate(folder: Path, trace_dir: Path | None = None) -> recorded.Recorder:
    recorder = recorded.start(folder)
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    for measured in columns().values():
        run_helper(recorder, measured)
    recorded.end_run(recorder)
    recorder.add(ev.RunJudged(run=1, verdict=verdict()))
    prediction = "padded to cached tokens = 3 mod 8 every request diverges"
    recorder.add(ev.ExperimentsPlanned(helper=HELPER, plan={"predictions": {"pad": prediction}}))
    for number, made in enumerate(MADE, 1):
        ended = {"run": 1, "helper": HELPER, "name": made["name"], "result": made, "elapsed_s": 8.0}
        recorder.add(ev.ExperimentEnded(experiment=number, **ended))
    request = recorded.first_dirty(HELPER)
    result = recorded.located(request, HELPER)
    result["findings"].append(operator_finding(request))
    if trace_dir is not None:
        keep_rows(trace_dir)
        result["capture"]["trace_dir"] = str(trace_dir)
    recorder.add(ev.Located(locate=1, run=1, helper=HELPER, request=request, result=result, elapsed_s=24.0))
    recorder.add(ev.Replayed(locate=1, finding=1, result=REPLAY, elapsed_s=1.0))
    recorder.add(ev.CensusTaken(census=1, result=census(), elapsed_s=3.0))
    return recorder
