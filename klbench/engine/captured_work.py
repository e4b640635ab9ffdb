"""What a capture repeats: one request of one measured helper, on a server that carries our plugin.

Same batch or it is another experiment: all prompts run again in the same order on the same cache state, with
the chosen request armed; the generation arm ends behind the first divergence, for nothing later can cause it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.trace import Arm
from klbench.engine.arms import ArmOptions, run_arms
from klbench.engine.capture_control import Backend, CaptureControl, RequestIds
from klbench.engine.client import ServerClient
from klbench.engine.compositions import read_compositions
from klbench.engine.dump_process import DumpProcess
from klbench.engine.forecast import Forecast, forecast
from klbench.engine.progress import ArmObserver
from klbench.errors import KlbenchError, UndecidedError

_CLOSE_AFTER_ERROR_S = 3.0


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What a capture needs of a server that carries our plugin."""

    client: ServerClient
    control: CaptureControl
    ids: RequestIds
    dumps: DumpProcess
    model_config: Mapping[str, Any]
    """The model's config.json, for the forecast; may be empty."""
    options: ArmOptions | None = None


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


def first_divergent_offset(columns: HelperColumns, request: int) -> int | None:
    """The first generated token of the request whose logprobs are not bit-equal, None where all are."""
    different = differs(columns, columns.tokens_of(request))
    return int(np.argmax(different)) if different.any() else None


def differs(columns: HelperColumns, tokens: slice) -> Any:
    """Which tokens' float32 bits differ; a NaN equals only the same NaN."""
    return columns.decode_nats[tokens].view(np.uint32) != columns.prefill_nats[tokens].view(np.uint32)


def generation_tokens(work: Work) -> int:
    """How many tokens the generation arm needs to show the first divergence again."""
    if work.whole_generation:
        return work.max_new_tokens
    first = first_divergent_offset(work.measured, work.request)
    return work.max_new_tokens if first is None else first + 1


def forecast_for(side: ServerSide, work: Work, backend: Backend = "digest") -> Forecast:
    """What the capture will write, from the measured forwards where they are known."""
    measured = []
    if work.measured_passes:
        log = side.control.control_dir / f"forwards-{side.control.ranks[0]}.jsonl"
        measured = read_compositions(log, side.ids.nonce, work.measured_passes)
    return forecast(
        side.model_config,
        work.measured,
        work.request,
        max_new_tokens=work.max_new_tokens,
        generation_tokens=generation_tokens(work),
        ranks=len(side.control.ranks),
        measured_forwards=measured,
        measured_passes=work.measured_passes,
        backend=backend,
    )


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
    capture was cut, or the server no longer repeats its tokens.
    """
    await side.control.open(
        folder,
        backend=backend,
        pattern=pattern,
        free_floor_bytes=free_floor_bytes,
        size_cap_bytes=size_cap_bytes,
    )
    rids = side.ids.next_pass({work.request})
    try:
        columns = await run_arms(
            side.client,
            work.helper,
            work.prompts,
            max_new_tokens=work.max_new_tokens,
            generation_tokens=generation_tokens(work),
            rids=rids,
            measured=work.measured,
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
