"""The noise floor of a path, and the threshold that it honestly allows.

    floor = noise_floor(passes)                 # prefill against prefill, decode against decode
    proposal = propose(averages, floor, server)
    proposal.threshold_nats, proposal.sentence

Several passes of one helper on one server are a measurement of its noise: where all passes have the same bits
in both arms and their average is exactly 0, the gate is sglang's own 1e-9. Otherwise the threshold lies just
above the largest average that was seen, for sglang lets pass what is below it. A further run of the same
noise reaches it at most once in (passes + 1); passes that are the same bit for bit are one observation and
tell nothing about chance. The sentence says what must be mended first: a threshold is no cure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns, compared_in_both
from klbench.core.kl import token_k3
from klbench.core.model_traits import model_traits
from klbench.core.thresholds import SGLANG_GATE_NATS

KEY_FIELDS = (
    "model",
    "tp_size",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "device",
    "gpus",
    "attention_backend",
    "deterministic",
    "page_size",
    "sglang_version",
    "numerics_env",
)
"""What a floor belongs to: with another of these it must be measured again."""


@dataclass(frozen=True, slots=True)
class ArmFloor:
    """One arm against itself: the largest average k3 and difference over all pairs with the first pass."""

    pairs: int
    tokens: int
    differing: int
    k3_nats: float
    max_abs_nats: float


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """How much passes of one helper differ from each other."""

    prefill: ArmFloor
    decode: ArmFloor
    shortened: int
    """Requests of later passes that generated other tokens than the first."""

    @property
    def zero(self) -> bool:
        return not (self.prefill.differing or self.decode.differing or self.shortened)


@dataclass(frozen=True, slots=True)
class Proposal:
    """`threshold_nats` None where the measurement allows none; each average was below it. `false_alarm_rate`:
    how often a further run of the same noise reaches it, at most; None where the passes do not tell."""

    threshold_nats: float | None
    zero: bool
    false_alarm_rate: float | None
    sentence: str
    first: str
    """What must be mended before the threshold means anything; empty where it means equality."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold_nats,
            "zero": self.zero,
            "false_alarm_rate": self.false_alarm_rate,
            "sentence": self.sentence,
            "first": self.first,
        }


def noise_floor(passes: Sequence[HelperColumns]) -> NoiseFloor:
    """Every later pass against the first, token by token, as far as both generated the same tokens."""
    base = passes[0]
    measured: dict[str, list[tuple[int, int, float, float]]] = {"prefill": [], "decode": []}
    shortened = 0
    for other in passes[1:]:
        kept, short = _shared(base, other)
        shortened += short
        for arm, one, two in (
            ("prefill", base.prefill_nats, other.prefill_nats),
            ("decode", base.decode_nats, other.decode_nats),
        ):
            measured[arm].append(_difference(one[kept[0]], two[kept[1]]))
    return NoiseFloor(_arm(measured["prefill"]), _arm(measured["decode"]), shortened)


def _shared(base: HelperColumns, other: HelperColumns) -> tuple[tuple[Any, Any], int]:
    """Indices of the tokens that both passes scored in the same context, and the requests cut short."""
    mine, theirs, short = [], [], 0
    lost = compared_in_both(base, other)[0].lost
    for request in range(min(base.requests, other.requests)):
        a, b = base.tokens_of(request), other.tokens_of(request)
        count = min(a.stop - a.start, b.stop - b.start)
        same = base.token_id[a][:count] == other.token_id[b][:count]
        shared = count if bool(same.all()) else int((~same).argmax())
        short += int(shared < max(a.stop - a.start, b.stop - b.start))
        mine.append(np.arange(a.start + lost[request], a.start + shared))
        theirs.append(np.arange(b.start + lost[request], b.start + shared))
    empty = np.zeros(0, dtype=np.int64)
    return (np.concatenate([empty, *mine]), np.concatenate([empty, *theirs])), short


def _difference(one: Any, two: Any) -> tuple[int, int, float, float]:
    """(tokens, differing bits, mean k3, largest difference) of two arrays of logprobs."""
    differing = int(np.count_nonzero(one.view(np.uint32) != two.view(np.uint32)))
    finite = np.isfinite(one) & np.isfinite(two)
    k3 = token_k3(one[finite], two[finite])
    largest = np.abs(one[finite].astype(np.float64) - two[finite].astype(np.float64))
    mean = float(k3.mean()) if len(k3) else 0.0
    return len(one), differing, mean, float(largest.max(initial=0.0))


def _arm(measured: Sequence[tuple[int, int, float, float]]) -> ArmFloor:
    return ArmFloor(
        pairs=len(measured),
        tokens=sum(part[0] for part in measured),
        differing=sum(part[1] for part in measured),
        k3_nats=max((part[2] for part in measured), default=0.0),
        max_abs_nats=max((part[3] for part in measured), default=0.0),
    )


def propose(averages: Sequence[float], floor: NoiseFloor, server: Mapping[str, Any]) -> Proposal:
    """The threshold that `averages`, the helper's avg_kl_div in each pass, allow."""
    if not averages or not floor.prefill.tokens or not all(map(math.isfinite, averages)):
        return Proposal(None, False, None, "fewer than two passes have numbers, so there is no floor", "")
    highest = max(averages)
    if highest == 0.0 and floor.zero:
        sentence = (
            f"{len(averages)} passes measure exactly 0 and repeat bit for bit: {SGLANG_GATE_NATS:g} nats "
            "is honest"
        )
        return Proposal(SGLANG_GATE_NATS, True, 0.0, sentence, "")
    threshold = threshold_above(highest)
    first = _mend_first(highest, floor, server)
    if floor.zero:
        sentence = (
            f"{len(averages)} passes are the same bit for bit, so they are one observation: each averages "
            f"{highest:.3g} nats, and how often another run reaches {threshold:g} is not known"
        )
        return Proposal(threshold, False, None, sentence, first)
    sentence = (
        f"the largest of {len(averages)} averages is {highest:.3g} nats, and the threshold just above it; by "
        f"chance a further run reaches it at most once in {len(averages) + 1}"
    )
    return Proposal(threshold, False, 1.0 / (len(averages) + 1), sentence, first)


def threshold_above(average_nats: float) -> float:
    """A threshold in nats that a run of this average passes, where passing is `average < threshold`: the next
    number of three digits, and never less than sglang's own gate."""
    if not average_nats >= SGLANG_GATE_NATS:
        return SGLANG_GATE_NATS
    exponent = math.floor(math.log10(average_nats)) - 2
    digits = math.floor(average_nats / 10.0**exponent)
    while (threshold := float(f"{digits}e{exponent}")) <= average_nats:
        digits += 1
    return threshold


def _mend_first(highest: float, floor: NoiseFloor, server: Mapping[str, Any]) -> str:
    if server.get("deterministic") is False:
        return "start the server with deterministic inference: until then this is the noise of its batches"
    if not floor.zero:
        both = (("the scoring arm", floor.prefill), ("the generation arm", floor.decode))
        named = " and ".join(name for name, arm in both if arm.differing) or "the generation arm"
        return (
            f"{named} gives other bits each time: a race, or batches that differ from run to run, comes first"
        )
    if (reason := model_traits(server).floor) is not None:
        return f"{reason}: compare hits with match on the same server instead of with a number"
    if highest == 0.0:
        return ""
    return "both arms repeat bit for bit, so this is no noise: locate the origin before accepting a threshold"


def calibration_key(server: Mapping[str, Any]) -> dict[str, Any]:
    """What the floor belongs to."""
    return {name: server.get(name) for name in KEY_FIELDS}
