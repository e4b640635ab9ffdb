"""One capture from start to finding: repeat the arms with armed ids, align, localise, measure, clean up.

    outcome = await capture(server_side, work, trace_dir=folder)
    outcome.body()          the parts of klbench.locate/1 that it fills

Digests are taken in place: the server writes the trace. The stock dumper writes files that are converted to
one; it also fetches the real rows of the few operators around an origin. Each forward is compared with the
measured run's. Dump files live in a folder of their own below `trace_dir` and are removed at the end, however
it ends, unless they are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from klbench.core.alignment import Alignment, align, ranks_of
from klbench.core.columns import HelperColumns, compared_in_both
from klbench.core.comparison import Pairs
from klbench.core.findings import Evidence, Finding, Localisation
from klbench.core.localisation import localise
from klbench.core.state_localisation import localise_state
from klbench.core.text import size
from klbench.core.trace import STATE_ONLY, Trace
from klbench.engine.attention_rows import recompute_attention
from klbench.engine.capture_control import Backend
from klbench.engine.captured_work import (
    ServerSide,
    Work,
    differs,
    first_divergent_offset,
    forecast_for,
    generation_tokens,
    last_positions,
    of_its_own,
    reaching,
    repeat_captured,
    repeats,
)
from klbench.engine.compositions import Repetition, compare_compositions, read_compositions
from klbench.engine.delta_rule_rows import recompute_delta_rules
from klbench.engine.dump_process import DumpReader
from klbench.engine.forecast import Forecast
from klbench.engine.progress import ArmObserver
from klbench.engine.recomputed_rows import rows_behind
from klbench.engine.traces import read_trace
from klbench.engine.ulp_rows import dump_pattern, head_size, measure_ulps, modules_to_measure, row_of_experts
from klbench.errors import KlbenchError, UndecidedError
from klbench.storage import free_bytes

FREE_FLOOR_BYTES = 2 << 30
"""Space that a capture leaves free on its disk."""

Progress = Callable[[str, int, int], None]
"""Phase, done, total."""
Beforehand = Callable[[Forecast, int], Awaitable[None]]
"""Hears what a capture is going to write and how many bytes are free for it, before anything is written;
raises where that is not agreed to."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a capture found."""

    work: Work
    backend: Backend
    alignment: Alignment
    localisation: Localisation
    repeats: bool
    """Whether it is the run that was measured; else it is one of its own."""
    repetition: Repetition | None
    changed_logprobs: int
    compared_logprobs: int
    symptom_shows: bool
    dump_bytes: int
    trace_bytes: int
    files: int
    forwards: int
    capture_s: float
    convert_s: float
    localise_s: float
    forecast: Forecast
    trace_dir: Path
    kept_dumps: Path | None
    notes: tuple[str, ...] = ()
    """What must be said beside the findings: sentences."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.localisation.findings

    def body(self) -> dict[str, Any]:
        """The parts of klbench.locate/1 that a capture fills, and what the origin screen draws."""
        found = self.localisation
        return {
            "alignment": self.alignment.as_dict()
            | {"beyond_end": self.alignment.beyond_end, "unpaired": self.alignment.unpaired},
            "capture": {
                "backend": self.backend,
                "bytes": self.dump_bytes,
                "changed_logprobs": self.changed_logprobs,
                "compared_logprobs": self.compared_logprobs,
                "symptom_shows": self.symptom_shows,
                "trace_bytes": self.trace_bytes,
                "files": self.files,
                "forwards": self.forwards,
                "forecast_bytes": self.forecast.size_bytes,
                "composition": self.repetition.as_dict() if self.repetition is not None else None,
                "capture_s": round(self.capture_s, 3),
                "convert_s": round(self.convert_s, 3),
                "localise_s": round(self.localise_s, 3),
                "trace_dir": str(self.trace_dir),
                "kept_dumps": str(self.kept_dumps) if self.kept_dumps is not None else None,
                "generated_tokens": generation_tokens(self.work),
                "max_new_tokens": self.work.max_new_tokens,
            },
            "notes": [*self.notes, *([self.work.cut] if self.work.cut is not None else [])],
            "findings": [finding.as_dict(self.work.helper) for finding in found.findings],
            "masked": [masked.as_dict() for masked in found.masked],
            "around": [neighbour.as_dict() for neighbour in found.around],
            "around_position": found.around_position,
            "around_arm": found.around_arm,
            "map": found.map.as_dict() if found.map is not None else None,
        }


async def capture(
    side: ServerSide,
    work: Work,
    *,
    trace_dir: Path,
    backend: Backend = "digest",
    numbers: bool = True,
    keep_dumps: bool = False,
    free_floor_bytes: int = FREE_FLOOR_BYTES,
    observe: ArmObserver | None = None,
    progress: Progress | None = None,
    beforehand: Beforehand | None = None,
) -> Outcome:
    """Captures, localises, fetches the numbers around the origins and cleans up.

    `trace_dir` (made if it is not there) keeps the trace. `numbers` False leaves the ulps out: with digests
    they cost a second pass over the arms. Raises UndecidedError when the disk is too full, a rank refuses,
    the capture was cut, or the server no longer repeats its tokens where the work says that it must; and
    what `beforehand` raises.
    """
    say = progress or _say_nothing
    expected = forecast_for(side, work, backend)
    free = _room_for(expected, trace_dir, free_floor_bytes)
    if beforehand is not None:
        await beforehand(expected, free)
    dumps, trace_folder = _new_folders(trace_dir)
    cap = max(4 * expected.size_bytes, 1 << 30)

    async def repeated(folder: Path, by: Backend, pattern: str | None, what: Work) -> HelperColumns:
        return await repeat_captured(
            side,
            what,
            folder,
            backend=by,
            pattern=pattern,
            free_floor_bytes=free_floor_bytes,
            size_cap_bytes=cap,
            observe=observe,
        )

    try:
        began = time.monotonic()
        say("repeating the arms", 0, expected.forwards)
        if backend != "dumper":
            trace_folder.mkdir(mode=0o700)
        columns = await repeated(dumps if backend == "dumper" else trace_folder, backend, None, work)
        _check_still_compared(work, columns)
        changed, compared = _changed(work, columns)
        repeated_itself = repeats(work, columns)
        if not repeated_itself:
            work = of_its_own(work, columns)
        captured_pass = side.ids.latest_pass
        capture_s, convert_s, converted = time.monotonic() - began, 0.0, None
        async with contextlib.AsyncExitStack() as stack:
            if backend == "dumper":
                began = time.monotonic()
                reader = await stack.enter_async_context(side.dumps.started())
                converted = await reader.convert(dumps, trace_folder, lambda a, b: say("converting", a, b))
                convert_s = time.monotonic() - began
            began = time.monotonic()
            say("localising", 0, 1)
            trace = await asyncio.to_thread(read_trace, trace_folder)
            alignments, found = await asyncio.to_thread(_localise, trace, work, columns)
            alignment = _telling(alignments)
            localise_s = time.monotonic() - began
            if numbers and found.findings and backend != "state":
                say("fetching rows", 0, 1)
                if backend == "dumper":
                    found = await measure_ulps(
                        reader,
                        dumps,
                        trace,
                        found,
                        _pairs(alignments),
                        keep_in=trace_folder,
                        head_size=head_size(side.model_config),
                    )
                    found = await _recomputed(reader, dumps, trace, found, alignments, side.model_config)
                else:
                    found = await _with_numbers(side, work, found, dumps, repeated, trace_folder)
        repetition = _repetition(side, work, captured_pass)
        trace_bytes = sum(path.stat().st_size for path in trace_folder.iterdir())
        outcome = Outcome(
            work=work,
            backend=backend,
            alignment=alignment,
            localisation=found,
            repeats=repeated_itself,
            repetition=repetition,
            changed_logprobs=changed,
            compared_logprobs=compared,
            symptom_shows=first_divergent_offset(columns, work.request) is not None,
            dump_bytes=trace_bytes if converted is None else converted.dump_bytes,
            trace_bytes=trace_bytes,
            files=len(list(trace_folder.iterdir())) if converted is None else converted.files,
            forwards=len(trace.forward_number),
            capture_s=capture_s,
            convert_s=convert_s,
            localise_s=localise_s,
            forecast=expected,
            trace_dir=trace_folder,
            kept_dumps=dumps if keep_dumps else None,
        )
        return _weighed(outcome)
    except BaseException:
        # Half a trace tells nothing, and nobody learns of its dumps.
        shutil.rmtree(trace_folder, ignore_errors=True)
        keep_dumps = False
        raise
    finally:
        if not keep_dumps:
            await asyncio.to_thread(shutil.rmtree, dumps, True)


async def _with_numbers(
    side: ServerSide,
    work: Work,
    found: Localisation,
    dumps: Path,
    repeated: Callable[[Path, Backend, str | None, Work], Awaitable[HelperColumns]],
    keep_in: Path,
) -> Localisation:
    """`found` with ulps: the arms once more, with the real rows of the few operators that matter dumped.

    A finding stands without its numbers; why they are missing is then part of its evidence.
    """
    # Dumps hold whole batches: no more of the generation than the origins need.
    latest = max(finding.first_position + rows_behind(finding) for finding in found.findings)
    latest = max(latest, found.around_position or 0)
    work = reaching(work, max(latest, row_of_experts(found, latest)))
    try:
        columns = await repeated(dumps, "dumper", dump_pattern(modules_to_measure(found)), work)
        rows = dumps / "trace"
        async with side.dumps.started() as reader:
            await reader.convert(dumps, rows, lambda _done, _total: None)
            trace = await asyncio.to_thread(read_trace, rows)
            alignments, _ = await asyncio.to_thread(_localise, trace, work, columns)
            if not _telling(alignments).proved:
                raise UndecidedError("the rows cannot be paired", why=_telling(alignments).reason or "")
            pairs = _pairs(alignments)
            found = await measure_ulps(
                reader,
                dumps,
                trace,
                found,
                pairs,
                keep_in=keep_in,
                head_size=head_size(side.model_config),
            )
            return await _recomputed(reader, dumps, trace, found, alignments, side.model_config)
    except KlbenchError as error:
        text = "The real rows were not fetched: " + ": ".join(
            part for part in (error.what, error.why) if part
        )
        lacking = Evidence("no_numbers", text + ".", {})
        findings = tuple(
            dataclasses.replace(finding, evidence=(*finding.evidence, lacking)) for finding in found.findings
        )
        return dataclasses.replace(found, findings=findings)


async def _recomputed(
    reader: DumpReader,
    dumps: Path,
    trace: Trace,
    found: Localisation,
    alignments: Sequence[Alignment],
    model_config: Mapping[str, Any],
) -> Localisation:
    found = await recompute_attention(reader, dumps, trace, found, _pairs(alignments), model_config)
    by_rank = {alignment.pairs.rank: alignment for alignment in alignments}
    return await recompute_delta_rules(reader, dumps, trace, found, by_rank)


def _say_nothing(phase: str, done: int, total: int) -> None:
    pass


def _room_for(expected: Forecast, trace_dir: Path, free_floor_bytes: int) -> int:
    """The bytes that are free where the trace will lie. Raises UndecidedError where it does not fit."""
    free = free_bytes(trace_dir.absolute()) or 0
    if free - expected.size_bytes < free_floor_bytes:
        raise UndecidedError(
            f"a capture would write about {size(expected.size_bytes)} to {trace_dir}",
            why=f"{size(free)} are free there and {size(free_floor_bytes)} must stay free",
            next="choose a larger disk with --trace-dir, or fewer and shorter prompts that still diverge",
        )
    return free


def _new_folders(trace_dir: Path) -> tuple[Path, Path]:
    """A new folder for the dumps and the name of the trace's."""
    trace_dir = trace_dir.absolute()
    trace_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = 1
    while True:
        dumps, trace = trace_dir / f"dumps-{number}", trace_dir / f"trace-{number}"
        if not trace.exists():
            try:
                dumps.mkdir(mode=0o700)
            except FileExistsError:
                pass
            else:
                return dumps, trace
        number += 1


def _localise(trace: Trace, work: Work, columns: HelperColumns) -> tuple[list[Alignment], Localisation]:
    """Aligns and localises every rank."""
    limits = last_positions(work, columns)
    alignments = [align(trace, work.request, rank, limits) for rank in ranks_of(trace)]
    if not alignments:
        raise UndecidedError(
            "nothing was captured",
            why="no forward held the chosen request",
            next="check that the server runs eager and carries klbench's plugin",
        )
    first_token = int(columns.prompt_len[work.request])
    divergent = first_token + np.flatnonzero(differs(columns, columns.tokens_of(work.request)))
    if trace.backend == STATE_ONLY:
        return alignments, localise_state(trace, alignments, divergent)
    return alignments, localise(trace, alignments, divergent, first_token)


def _telling(alignments: Sequence[Alignment]) -> Alignment:
    """The first rank's stands for all, unless another refuses."""
    return next((alignment for alignment in alignments if not alignment.proved), alignments[0])


def _pairs(alignments: Sequence[Alignment]) -> dict[int, Pairs]:
    return {alignment.pairs.rank: alignment.pairs for alignment in alignments}


def _check_still_compared(work: Work, columns: HelperColumns) -> None:
    """Raises UndecidedError where all that diverged has no logprob in the repeat: that does not show whether
    it diverges again."""
    if not repeats(work, columns) or first_divergent_offset(work.measured, work.request) is None:
        return
    left, _ = compared_in_both(work.measured, columns)
    if first_divergent_offset(left, work.request) is None:
        raise UndecidedError(
            f"whether request {work.request} diverges again cannot be seen",
            why="only its first token does, and this time the server lost the logprob of that one",
            next="locate it once more, or another request; a larger pool retracts none: --max-total-tokens "
            "after --",
        )


def _changed(work: Work, columns: HelperColumns) -> tuple[int, int]:
    """How many logprobs of all requests changed their bits under capture, and how many were compared: those
    behind equal tokens, but for those that were lost."""
    changed = compared = 0
    columns, measured = compared_in_both(columns, work.measured)
    for request in range(columns.requests):
        if not np.array_equal(columns.prompt_of(request), measured.prompt_of(request)):
            continue
        now, before = columns.compared_of(request), measured.compared_of(request)
        count = min(now.stop - now.start, before.stop - before.start)
        other = columns.token_id[now][:count] != measured.token_id[before][:count]
        count = int(other.argmax()) if other.any() else count
        for name in ("decode_nats", "prefill_nats"):
            a = getattr(columns, name)[now][:count].view(np.uint32)
            b = getattr(measured, name)[before][:count].view(np.uint32)
            changed += int((a != b).sum())
            compared += count
    return changed, compared


def _repetition(side: ServerSide, work: Work, captured_pass: int) -> Repetition | None:
    log = side.control.forwards
    if not work.measured_passes or log is None:
        return None
    forwards = read_compositions(log, side.ids.nonce, [*work.measured_passes, captured_pass])
    return compare_compositions(forwards, work.measured_passes, forwards, [captured_pass], work.request)


def _weighed(outcome: Outcome) -> Outcome:
    """Lowers the grade, with the reason, where the capture was not the measured experiment."""
    doubts = []
    if not outcome.repeats:
        text = "The server did not repeat its tokens: what was captured is a run of its own."
        doubts.append(Evidence("not_repeated", text, {}))
    if not outcome.symptom_shows:
        text = "The divergence did not show again while it was captured."
        doubts.append(Evidence("symptom_gone", text, {}))
    if outcome.changed_logprobs:
        text = f"{outcome.changed_logprobs} logprobs changed their bits under capture."
        doubts.append(Evidence("capture_changed_logprobs", text, {"count": outcome.changed_logprobs}))
    repetition = outcome.repetition
    if repetition is not None and not repetition.repeated:
        text = (
            f"{repetition.forwards - repetition.same} of {repetition.forwards} forwards of the request were "
            f"not made of the same rows as in the measured run: {repetition.first_difference}."
        )
        doubts.append(Evidence("other_batch", text, repetition.as_dict()))
    if not doubts:
        return outcome
    findings = tuple(
        dataclasses.replace(finding, grade="unknown", evidence=(*finding.evidence, *doubts))
        for finding in outcome.findings
    )
    return dataclasses.replace(
        outcome, localisation=dataclasses.replace(outcome.localisation, findings=findings)
    )
