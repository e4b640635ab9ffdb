"""The fault matrix: faults of the catalogue, one after the other on one live server, judged by their truth.

    flock /tmp/server.lock .venv/bin/python -m tests.lab.matrix --model dense --faults key-write,residual-gap

    dense: started in 29 s
    fault         fired dirty helpers answer s  located
    restore-key      12 . P D right   right  2  state_restore model.layers.1.self_attn.attn 179 (expected 179)
    key-write        20 M P D right   right  3  state_write model.layers.1.self_attn.attn 183 (expected 183)

For each fault: flush, arm, run the three helpers, capture the first divergent request of the first dirty one,
localise, compare with the truth, disarm, flush, and see that the helper is clean again. An answer is "right",
"undecided" (what is true is among the kinds that remain, or the capture refused with a reason), "wrong", "did
not fire" or "not planted" (the model has no such place).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.findings import Finding
from klbench.engine.capture import Outcome, capture
from klbench.engine.capture_control import Backend, RequestIds
from klbench.engine.captured_work import Work, first_divergent_offset
from klbench.engine.compositions import read_compositions
from klbench.engine.fault_control import FaultControl
from klbench.engine.server import Server
from klbench.engine.target import Demo, LaunchOptions
from klbench.errors import KlbenchError, UndecidedError
from klbench.insitu.faults_catalogue import CATALOGUE, PAIR_CATALOGUE, ArmedFault, parse_faults
from klbench.session.locating import server_side
from klbench.zoo import Kind, plain_token_ids, seeded_prompts
from tests.lab.expectations import First, first_position

LETTERS = {"match": "M", "prefill_cache_hit": "P", "decode_cache_hit": "D"}


@dataclass
class Row:
    """One line of the table."""

    fault: str
    fired: int = 0
    dirty: tuple[str, ...] = ()
    helpers: str = "-"
    kinds: tuple[str, ...] = ()
    module: str = "-"
    found: int = -1
    expected: str = "-"
    answer: str = "-"
    why: str = ""
    clean_again: bool = False
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    masked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    capture: dict[str, Any] = dataclasses.field(default_factory=dict)
    elapsed_s: float = 0.0


class Lab:
    """One server and the prompts that every fault sees."""

    def __init__(
        self,
        server: Server,
        prompts: Sequence[list[int]],
        new_tokens: int,
        backend: Backend,
        traces: Path,
    ) -> None:
        assert server.control_dir is not None
        assert server.nonce is not None
        self._server = server
        self._prompts = prompts
        self._new_tokens = new_tokens
        self._backend: Backend = backend
        self._traces = traces
        self._ids = RequestIds(server.nonce)
        self._side = server_side(server, self._ids)
        self._log = server.control_dir / f"forwards-{self._side.control.ranks[0]}.jsonl"
        self.faults = FaultControl(server.control_dir, server.nonce, self._side.control.ranks)

    async def measure(self, helper: HelperName) -> tuple[HelperColumns, int]:
        rids = self._ids.next_pass()
        number = self._ids.latest_pass
        columns = await self._server.run_helper(
            helper, self._prompts, max_new_tokens=self._new_tokens, rids=rids
        )
        return columns, number

    async def one(self, name: str) -> Row:
        """Everything about one fault."""
        row, began = Row(name), time.monotonic()
        try:
            await self._server.client.flush()
            await self.faults.arm(name)
        except KlbenchError as error:
            row.answer, row.why = "not planted", f"{error.what}: {error.why}"
            return row
        try:
            await self._armed(row, name, parse_faults(name))
        except UndecidedError as error:
            row.answer, row.why = "undecided", f"{error.what}: {error.why}"
        except Exception:
            row.answer, row.why = "error", traceback.format_exc()[-1500:]
        row.fired = min((entry.count for entry in await self.faults.disarm()), default=0)
        if row.fired == 0:
            row.answer, row.why = "did not fire", "nothing was changed"
        await self._server.client.flush()
        helper = next((helper for helper in HELPERS if helper in row.dirty), "match")
        columns, _ = await self.measure(helper)
        row.clean_again = dirty_requests(columns) == []
        if not row.clean_again:
            row.answer, row.why = "wrong", f"{helper} is not clean after disarming; {row.why}"
        row.elapsed_s = time.monotonic() - began
        return row

    async def _armed(self, row: Row, name: str, armed: Sequence[ArmedFault]) -> None:
        measured = {helper: await self.measure(helper) for helper in HELPERS}
        row.dirty = tuple(helper for helper in HELPERS if dirty_requests(measured[helper][0]))
        expected = {helper for fault in armed for helper in fault.fault.truth.dirty_helpers}
        if measured["match"][0].cached_generation.any():
            # Prompts with a common prefix restore it even inside match, where they do not share a forward.
            expected = set(HELPERS)
        row.helpers = "right" if set(row.dirty) == expected else "wrong"
        if not row.dirty:
            row.answer, row.why = "wrong", "all helpers are clean"
            return
        helper = next(helper for helper in HELPERS if helper in row.dirty)
        columns, number = measured[helper]
        request = dirty_requests(columns)[0]
        outcome = await capture(
            self._side,
            # The second fault of a pair may begin behind the first divergence.
            Work(
                helper,
                self._prompts,
                request,
                columns,
                self._new_tokens,
                (number,),
                whole_generation=len(armed) > 1,
            ),
            trace_dir=self._traces,
            backend=self._backend,
            numbers=False,
        )
        captured = self._ids.latest_pass
        passed = read_compositions(self._log, self._ids.nonce, [captured])
        first = [first_position(fault, columns, request, passed, captured) for fault in armed]
        row.findings = [finding.as_dict(helper) for finding in outcome.findings]
        body = outcome.body()
        row.capture = body["capture"] | body["alignment"]
        row.masked = [masked.as_dict() for masked in outcome.localisation.masked]
        judge(
            row, armed, first, outcome, PAIR_CATALOGUE.get(name) is not None and PAIR_CATALOGUE[name].masked
        )


def dirty_requests(columns: HelperColumns) -> list[int]:
    return [
        request for request in range(columns.requests) if first_divergent_offset(columns, request) is not None
    ]


def judge(
    row: Row, armed: Sequence[ArmedFault], first: Sequence[First], outcome: Outcome, masked: bool
) -> None:
    """Compares what was located with what is true."""
    findings = [finding for finding in outcome.findings if not finding.latent]
    if not findings and not outcome.symptom_shows:
        row.answer, row.why = "undecided", "the divergence did not show again"
        return
    if not findings:
        row.answer, row.why = "wrong", "nothing was located"
        return
    top = findings[0]
    row.kinds, row.module, row.found = top.kinds, top.module, top.first_position
    row.expected = str(first[0])
    wanted = list(zip(armed, first, strict=True))[: 1 if masked else None]
    answers, reasons, used = [], [], set()
    for fault, where in wanted:
        answer, reason, place = _best(fault, where, findings)
        answers.append(answer)
        reasons.append(reason)
        used.add(place)
    others = [
        finding
        for place, finding in enumerate(findings)
        if place not in used and not any(_speaks_of(finding, fault) for fault in armed)
    ]
    if others:
        answers.append("wrong")
        reasons.append(
            "accused too: " + ", ".join(f"{f.kinds[0]} {f.module}@{f.first_position}" for f in others)
        )
    if masked and not any(_same(entry.module, armed[1].module) for entry in outcome.localisation.masked):
        answers.append("wrong")
        reasons.append(f"{armed[1].module} is not listed as masked")
    row.answer = next((a for a in ("wrong", "undecided") if a in answers), "right")
    row.why = "; ".join(filter(None, reasons))


def _best(fault: ArmedFault, where: First, findings: Sequence[Finding]) -> tuple[str, str, int]:
    """(answer, why, place) of the finding that speaks of this fault."""
    for place, finding in enumerate(findings):
        if not _speaks_of(finding, fault):
            continue
        kinds = fault.fault.truth.kinds
        if not where.allows(finding.first_position):
            return "wrong", f"{finding.module} begins at {finding.first_position}, not {where}", place
        if len(finding.kinds) > 1 or finding.kinds == ("not_observed",):
            return "undecided", f"{finding.module} could be {', '.join(finding.kinds)}", place
        if finding.kind not in kinds:
            return "wrong", f"{finding.module} is {finding.kind}, not {' or '.join(kinds)}", place
        return "right", "", place
    return "wrong", f"nothing speaks of {fault.module}", -1


def _speaks_of(finding: Finding, fault: ArmedFault) -> bool:
    return _same(finding.module, fault.module)


def _same(found: str, true: str) -> bool:
    return [part.removeprefix("model.") for part in found.split(" -> ")] == [
        part.removeprefix("model.") for part in true.split(" -> ")
    ]


def names_for(model: str, asked: str | None, new_tokens: int) -> list[str]:
    """The faults to plant, with parameters that fit short runs."""
    fitting = {"decode-window": "after=4", "attention-prompt": f"tile={2 * new_tokens}"}
    if asked is not None:
        names = asked.split(";") if ";" in asked else asked.split(",") if "=" not in asked else [asked]
        names = [name for name in names if name]
    else:
        names = [fault.name for fault in CATALOGUE.values() if model in fault.truth.models]
        names += [pair.name for pair in PAIR_CATALOGUE.values() if model in pair.models]
    return [f"{name}:{fitting[name]}" if name in fitting else name for name in names]


def prompts_for(batch: int, tokens: int, shared: int) -> list[list[int]]:
    """Seeded prompts; the first `shared` tokens of all of them are the same."""
    prompts = seeded_prompts(batch, tokens, 7, plain_token_ids())
    common = prompts[0][:shared]
    return [common + prompt[len(common) :] for prompt in prompts]


async def run_matrix(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    names = names_for(arguments.model, arguments.faults, arguments.new_tokens)
    with tempfile.TemporaryDirectory(prefix="klbench-matrix-") as folder:
        options = LaunchOptions(arguments=tuple(arguments.flags), ready_to_capture=True, fault_lab=True)
        server = await Server.start(Demo(arguments.model), options, folder=Path(folder) / "server")
        print(f"{arguments.model}: started in {server.launch_s:.0f} s", flush=True)
        try:
            prompts = prompts_for(arguments.batch, arguments.prompt_tokens, arguments.shared_prefix)
            traces = arguments.traces or Path(folder) / "traces"
            lab = Lab(server, prompts, arguments.new_tokens, arguments.backend, traces)
            print(HEADER, flush=True)
            for name in names:
                rows.append(await lab.one(name))
                print(line(rows[-1]), flush=True)
        finally:
            await server.stop()
    return rows


HEADER = f"{'fault':30s} {'fired':>6s} {'dirty':6s} {'helpers':7s} {'answer':12s} {'s':>4s}  located"


def line(row: Row) -> str:
    letters = " ".join(LETTERS[helper] if helper in row.dirty else "." for helper in HELPERS)
    located = f"{'|'.join(row.kinds)} {row.module} {row.found} (expected {row.expected})"
    tail = f"  [{row.why}]" if row.why else ""
    return (
        f"{row.fault:30s} {row.fired:6d} {letters:6s} {row.helpers:7s} {row.answer:12s} "
        f"{row.elapsed_s:4.0f}  {located}{tail}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the fault matrix on one live server.")
    parser.add_argument("--model", choices=get_args(Kind), default="dense")
    parser.add_argument("--faults", help="names, comma-separated; with parameters semicolon-separated")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--backend", choices=get_args(Backend), default="digest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--traces", type=Path, help="keep the traces there")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="sglang's own; must come last")
    arguments = parser.parse_args()
    rows = asyncio.run(run_matrix(arguments))
    counts = {
        answer: sum(row.answer == answer for row in rows) for answer in sorted({r.answer for r in rows})
    }
    print(", ".join(f"{count} {answer}" for answer, count in counts.items()))
    if arguments.json is not None:
        content = {"arguments": vars(arguments), "rows": [dataclasses.asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, default=str, indent=1))
    return 0 if set(counts) <= {"right"} else 1


if __name__ == "__main__":
    sys.exit(main())
