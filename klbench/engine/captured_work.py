"""What a capture repeats: one request of one measured helper, on a server that carries our plugin.

Same batch or it is another experiment: all prompts run again in the same order on the same cache state, with
the chosen request armed. Nothing behind the first divergence can cause it, so the generation arm may end
there; a second origin may begin later, so all of it is generated where the forecast affords that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.trace import Arm
from klbench.engine.arms import ArmOptions, run_arms
from klbench.engine.capture_control import Backend, CaptureSwitch, RequestIds
from klbench.engine.client import ServerClient
from klbench.engine.compositions import read_compositions
from klbench.engine.dump_process import DumpReaders
from klbench.engine.forecast import Forecast, forecast
from klbench.engine.progress import ArmObserver
from klbench.errors import KlbenchError, UndecidedError

_CLOSE_AFTER_ERROR_S = 3.0

_SHARED_TOKENS = 16
"""A shorter common prefix (a template's first tokens) does not make another request worth capturing."""
_OTHER_WRITERS = 3

WHOLE_BYTES = 1 << 30
"""Up to this forecast the whole generation is captured: a trace takes about three times as much memory."""


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What a capture needs of a server that carries our plugin."""

    client: ServerClient
    control: CaptureSwitch
    ids: RequestIds
    dumps: DumpReaders
    model_config: Mapping[str, Any]
    """The model's config.json, for the forecast; may be empty."""
    options: ArmOptions | None = None
    page_size: int = 1
    checkpoint_interval: int | None = None
    """Tokens between two checkpoints of recurrent state; None for a model without one."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is captured: one request of one measured helper."""

    helper: HelperName
    prompts: Sequence[Sequence[int]]
    request: int
    measured: HelperColumns
    max_new_tokens: int
    measured_passes: Collection[int] = ()
    """The passes of the measured run, for comparing compositions."""
    whole_generation: bool = False
    """Generate all tokens again, past the first divergence: origins that begin later are found too."""
    at_least: int = 0
    """Tokens that are generated again in any case."""
    cut: str | None = None
    """Why it is not the whole generation of the measured run, in sentences; None where it is."""
    must_repeat: bool = True
    """The measured tokens must come again; else what comes is captured, where other tokens come as a run of
    its own, which is then the work's `measured`."""


_RUN_OF_ITS_OWN = (
    "The server did not repeat its tokens, so what was captured is a run of its own: its two arms were "
    "compared with each other."
)


def repeats(work: Work, columns: HelperColumns) -> bool:
    """Whether the captured arms are those that were measured, as far as they were generated again."""
    measured = work.measured
    return np.array_equal(columns.dropped, measured.dropped) and all(
        np.array_equal(columns.prompt_of(request), measured.prompt_of(request))
        and (now := columns.tokens_generated(request)) == measured.tokens_generated(request)[: len(now)]
        for request in range(columns.requests)
    )


def of_its_own(work: Work, columns: HelperColumns) -> Work:
    """`work` on the captured arms, which are no repeat: repeats of it are repeats of them."""
    return replace(
        work,
        measured=columns,
        must_repeat=True,
        whole_generation=False,
        at_least=generation_tokens(work),
        cut=" ".join(filter(None, (_RUN_OF_ITS_OWN, work.cut))),
    )


def prefix_writers(work: Work) -> frozenset[int]:
    """Other requests that may have written the cached prefix of the chosen one: captured with it.

    The first request of the batch with a common prefix owns its slots, a later one with a longer common
    prefix what goes beyond. Of many, those with the longest are taken: what the others wrote lies
    further from the end of the prefix.
    """
    if not int(work.measured.cached_generation[work.request]):
        return frozenset()
    own = work.measured.prompt_of(work.request)
    longest, found = _SHARED_TOKENS - 1, []
    for other in range(work.measured.requests):
        theirs = work.measured.prompt_of(other)
        length = min(len(own), len(theirs))
        same = own[:length] == theirs[:length]
        common = length if same.all() else int(np.argmin(same))
        if other != work.request and common > longest:
            longest = common
            found.append(other)
    return frozenset(found[-_OTHER_WRITERS:])


def first_divergent_offset(columns: HelperColumns, request: int) -> int | None:
    """The first generated token of the request whose logprobs are not bit-equal, None where all that were
    compared are."""
    different = differs(columns, columns.tokens_of(request))
    return int(np.argmax(different)) if different.any() else None


def differs(columns: HelperColumns, tokens: slice) -> Any:
    """Which tokens' float32 bits differ; a NaN equals only the same NaN. None that was not compared."""
    decode, prefill = columns.decode_nats[tokens], columns.prefill_nats[tokens]
    return (decode.view(np.uint32) != prefill.view(np.uint32)) & columns.compared[tokens]


def generation_tokens(work: Work) -> int:
    """How many tokens the generation arm generates again; up to the first divergence or all."""
    first = first_divergent_offset(work.measured, work.request)
    if work.whole_generation or (first is None and not work.at_least):
        return work.max_new_tokens
    needed = 0 if first is None else first + 1
    return min(max(needed, work.at_least), work.max_new_tokens)


def reaching(work: Work, position: int) -> Work:
    """`work` cut behind the row at `position`, or behind the first divergence where that is later."""
    prompt = int(work.measured.prompt_len[work.request])
    return replace(work, whole_generation=False, at_least=max(position - prompt + 2, 1))


def as_whole_as_affordable(
    side: ServerSide, work: Work, backend: Backend = "digest", limit_bytes: int = WHOLE_BYTES
) -> Work:
    """`work` over the whole generation, or as it is and with the reason where that would be too much."""
    whole = replace(work, whole_generation=True)
    expected = forecast_for(side, whole, backend)
    if expected.size_bytes <= limit_bytes:
        return whole
    cut = (
        f"Only {generation_tokens(work)} of {work.max_new_tokens} generated tokens were captured: all would "
        f"take about {expected.size_bytes >> 20} MiB, the limit is {limit_bytes >> 20} MiB. An origin that "
        "begins behind the first divergence is not seen."
    )
    return replace(work, cut=" ".join(filter(None, (work.cut, cut))))


def forecast_for(side: ServerSide, work: Work, backend: Backend = "digest") -> Forecast:
    """What the capture will write, from the measured forwards where they are known."""
    measured = []
    if work.measured_passes and (log := side.control.forwards) is not None:
        measured = read_compositions(log, side.ids.nonce, work.measured_passes)
    captured = 1 + (len(prefix_writers(work)) if backend != "dumper" else 0)
    expected = forecast(
        side.model_config,
        work.measured,
        work.request,
        max_new_tokens=work.max_new_tokens,
        generation_tokens=generation_tokens(work),
        ranks=len(side.control.ranks),
        measured_forwards=measured,
        measured_passes=work.measured_passes,
        backend=backend,
        # Only our plugin tells the forwards of a request from the others.
        every_forward=side.control.forwards is None,
    )
    return replace(expected, rows=captured * expected.rows, size_bytes=captured * expected.size_bytes)


def last_positions(work: Work, columns: HelperColumns) -> dict[Arm, int]:
    """For each arm, the last row that the request needed: prompt and all generated tokens but the last."""
    prompt = int(columns.prompt_len[work.request])
    output = int(columns.output_len[work.request])
    limits = {Arm.GENERATION: prompt + output - 2}
    if work.helper == "decode_cache_hit":
        # The second turn is the first prompt, its output and a separator of one token or more.
        first_output = prompt - len(work.prompts[work.request]) - 1
        limits[Arm.WARMING] = len(work.prompts[work.request]) + max(first_output, 1) - 2
    return limits


async def repeat_captured(
    side: ServerSide,
    work: Work,
    folder: Path,
    *,
    backend: Backend,
    free_floor_bytes: int,
    size_cap_bytes: int,
    pattern: str | None = None,
    observe: ArmObserver | None = None,
) -> HelperColumns:
    """Runs the arms with the request captured into `folder` (ours, mode 0700); its pass is `ids.latest_pass`.

    `pattern` limits the dumper to tensors whose name it finds. Raises UndecidedError when a rank refuses, the
    capture was cut, or the server no longer repeats its tokens where it must.
    """
    await side.control.open(
        folder,
        backend=backend,
        pattern=pattern,
        free_floor_bytes=free_floor_bytes,
        size_cap_bytes=size_cap_bytes,
    )
    rids = side.ids.next_pass({work.request, *(prefix_writers(work) if backend != "dumper" else ())})
    try:
        columns = await run_arms(
            side.client,
            work.helper,
            work.prompts,
            max_new_tokens=work.max_new_tokens,
            generation_tokens=generation_tokens(work),
            rids=rids,
            measured=work.measured,
            must_repeat=work.must_repeat,
            observe=observe,
            options=side.options,
        )
    except BaseException:
        # A server that died answers nothing more; what it died of is the error.
        with contextlib.suppress(KlbenchError):
            await asyncio.shield(side.control.close(limit_s=_CLOSE_AFTER_ERROR_S))
        raise
    await side.control.close()
    if (reason := side.control.invalid(folder)) is not None:
        raise UndecidedError("the capture was cut", why=reason, next="free the disk and capture again")
    return columns
