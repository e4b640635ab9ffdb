"""Has a server that carries our plugin replay operators, and reads what it found.

    replays = await replay(side, tokens, folder=folder, rows=[1, 2, 3, 4, 8])

The other side is klbench/insitu/replay.py. A carrier request with `tokens` is scored for it, so that its rows
are real; its answer is thrown away. Large models take several carriers, each for some of the operators, so
that no forward is held up for long. What the server wrote is checked before it is believed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from klbench.core.census import Damage, OperatorReplay, Status, joined_variants
from klbench.core.ulps import compare_rows
from klbench.engine.capture_control import CaptureControl
from klbench.engine.captured_work import ServerSide
from klbench.engine.control_file import ControlFile, Wording
from klbench.engine.traces import read_rows
from klbench.errors import UndecidedError

_RESULT_LIMIT_S = 60.0
_POLL_S = 0.02
MAX_JSON_BYTES = 64 << 20
_AT_ONCE = 64
"""Operators that one carrier's forward replays."""

_WORDING = Wording(about="replays", refused="cannot replay", silent_next="let klbench launch the server")

Progress = Callable[[int, int], None]
"""Operators done, and all."""


class _Output(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    variants: list[list[int]]


class _Operator(msgspec.Struct, frozen=True):
    module: str
    call: int
    class_name: str = msgspec.field(name="class")
    order: int
    status: Status
    reason: str
    total: int
    tried: list[int]
    judged: list[int]
    arguments: list[_Output]


class _Result(msgspec.Struct, frozen=True):
    nonce: str
    rank: int
    carrier: str
    error: str | None
    rows: int
    total: int
    operators: list[_Operator]


async def replay(
    side: ServerSide,
    tokens: Sequence[int],
    *,
    folder: Path,
    rows: Collection[int],
    modules: Collection[str] | None = None,
    wrap: bool = False,
    position: int | None = None,
    keep_bytes: int = 0,
    progress: Progress | None = None,
) -> tuple[OperatorReplay, ...]:
    """The replays of the operators of all ranks, in execution order.

    `folder` (new, made here) keeps what the server wrote. `rows` are the M to try beside N = the rows of the
    carrier's forward; with `wrap` M may pass N. `modules` names call sites, None for all. The judged row is
    the one at `position`, else the first, the middle and the last. Raises UndecidedError where a rank does
    not answer or could not replay.
    """
    if side.options is not None and side.options.routed_dp_rank is not None:
        raise UndecidedError(
            "operators cannot be replayed on a data-parallel server",
            why="a request reaches one of its replicas only",
            next="launch it with --dp-size 1",
        )
    if not isinstance(side.control, CaptureControl):
        raise UndecidedError(
            "operators cannot be called again on this server",
            why="it was not started with klbench's plugin",
            next="klbench env prints what to put before its launch",
        )
    server = side.control
    await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True)
    control = ControlFile(server.control_dir, server.nonce, server.ranks, "replay", _WORDING)
    found: list[OperatorReplay] = []
    first, total = 0, 1
    while first < total:
        place = folder / f"carrier-{first // _AT_ONCE + 1}"
        place.mkdir(mode=0o700)
        rid = side.ids.next_pass()("scoring", 0)
        asked = {
            "carrier": rid,
            "modules": None if modules is None else sorted(modules),
            "first": first,
            "count": _AT_ONCE,
            "rows": sorted(rows),
            "wrap": wrap,
            "position": position,
            "keep_bytes": keep_bytes,
        }
        await server.ask_in(control, place.absolute(), asked)
        try:
            await side.client.generate(
                [list(tokens)], max_new_tokens=0, return_logprob=True, logprob_start_len=0, rids=[rid]
            )
            results = [await _result(side, place, rank, rid) for rank in server.ranks]
        finally:
            await asyncio.shield(control.ask(None))
        for result in results:
            found += await asyncio.to_thread(_operators, place, result)
        total = max(result.total for result in results)
        first += _AT_ONCE
        if progress is not None:
            progress(min(first, total), total)
    return tuple(sorted(found, key=lambda operator: (operator.order, operator.rank)))


async def _result(side: ServerSide, folder: Path, rank: int, carrier: str) -> _Result:
    """What the rank wrote about the carrier; it does so in the forward, another rank may be behind."""
    path = folder / f"replay-{rank}.json"
    deadline = time.monotonic() + _RESULT_LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise UndecidedError(
                f"rank {rank} of the server replayed nothing",
                why="the carrier request was answered without a forward that holds it",
                next="launch with --ready-to-capture, and without --enable-mixed-chunk",
            )
        await asyncio.sleep(_POLL_S)
    result = decode_result(await asyncio.to_thread(path.read_bytes))
    if result.nonce != side.control.nonce or result.carrier != carrier or result.rank != rank:
        raise UndecidedError(f"{path} does not belong to this replay")
    if result.error is not None:
        last = result.error.strip().rsplit("\n", 1)[-1]
        raise UndecidedError(f"rank {rank} of the server could not replay", why=last[:500])
    return result


def decode_result(content: bytes) -> _Result:
    """The checked content of a rank's result file. Raises UndecidedError."""
    try:
        result = msgspec.json.decode(content[:MAX_JSON_BYTES], type=_Result)
        for operator in result.operators:
            _check(operator)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UndecidedError("what the server wrote about its replays is damaged", why=str(error)) from error
    return result


def _check(operator: _Operator) -> None:
    if operator.status in ("invariant", "not_invariant") and not operator.arguments:
        raise ValueError(f"{operator.module} has no result")
    for argument in operator.arguments:
        lengths = {len(row) for row in argument.variants}
        if len(argument.variants) != len(operator.judged) or lengths - {len(operator.tried)}:
            raise ValueError(f"{operator.module}: results and row counts do not fit")


def _operators(folder: Path, result: _Result) -> list[OperatorReplay]:
    rows = read_rows(folder / f"rows-{result.rank}.safetensors")
    return [
        OperatorReplay(
            module=operator.module,
            call=operator.call,
            class_name=operator.class_name,
            order=operator.order,
            rank=result.rank,
            status=operator.status,
            reason=operator.reason,
            total=operator.total,
            tried=tuple(operator.tried),
            judged=tuple(operator.judged),
            variants=joined_variants([argument.variants for argument in operator.arguments]),
            damage=_damage(rows, number, operator),
        )
        for number, operator in enumerate(result.operators)
    ]


def _damage(
    rows: Mapping[str, tuple[str, npt.NDArray[np.uint8]]], number: int, operator: _Operator
) -> Damage | None:
    """The largest difference between a row's result alone and any other that it had."""
    found: list[Damage] = []
    for argument in operator.arguments:
        for judged in range(len(operator.judged)):
            alone = rows.get(f"{number}/{argument.name}/{judged}/0")
            variant = 1
            while alone is not None:
                other = rows.get(f"{number}/{argument.name}/{judged}/{variant}")
                if other is None:
                    break
                difference = compare_rows(alone[0], alone[1], other[1])
                if difference is not None:
                    found.append(
                        Damage(
                            ulp_max=difference.max_ulps,
                            differing=difference.differing,
                            elements=difference.elements,
                            not_numbers=difference.not_numbers,
                            pattern=difference.pattern,
                            argument=argument.name,
                        )
                    )
                variant += 1
    return max(found, key=lambda damage: damage.size, default=None)
