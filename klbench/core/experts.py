"""Which experts a mixture of experts chose otherwise in the two arms: by layer and row.

    fact = experts_chosen(trace, pairs, comparison)
    "Tokens go to other experts, or in another order, in 9 of 12 layers, from layer 2 on; first at row ..."

A router's choice is discrete: a difference of one ulp at its input changes nothing, or a whole expert. It is
a consequence of an origin, never one of its own, unless its inputs are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from klbench.core.comparison import Comparison, Pairs, Status
from klbench.core.findings import Evidence, Finding
from klbench.core.trace import Arm, Direction, Operator, Phase, Trace

EXPERTS = "experts_differ"
"""Code of the evidence."""

IDS = "topk_ids"
"""What sglang calls the experts' numbers in the output of its TopK modules."""


def experts_chosen(trace: Trace, pairs: Pairs, comparison: Comparison) -> Evidence | None:
    """In which layers and from which row on the chosen experts differ; None where no layer says it differs.

    `values` has "module", "call", "layer", "position", "arm", "phase" and "rank" of the first, by row and
    then by layer.
    """
    routers = [
        column
        for column in np.flatnonzero(comparison.direction == Direction.OUT).tolist()
        if trace.arguments[comparison.argument[column]].rpartition(".")[2] == IDS
    ]
    differs = comparison.status[routers] == Status.DIFFERS
    if not differs.any():
        return None
    in_layer, in_row = differs.any(axis=1), np.flatnonzero(differs.any(axis=0))
    node = int(in_row[np.argmin(pairs.position[in_row])])
    operator = trace.operators[comparison.operator[routers[int(np.argmax(differs[:, node]))]]]
    lowest = trace.operators[comparison.operator[routers[int(np.argmax(in_layer))]]]
    layers, rows = int(in_layer.sum()), len(np.unique(pairs.position[in_row]))
    position = int(pairs.position[node])
    text = (
        f"Tokens go to other experts, or in another order, in {layers} of {len(routers)} layers, from "
        f"{_place(lowest)} on; first at row {position}, in {_place(operator)}; {rows} rows of the request."
    )
    values = {
        "module": operator.module,
        "call": operator.call,
        "layer": operator.layer,
        "position": position,
        "arm": Arm(int(pairs.arm[node])).name.lower(),
        "phase": Phase(int(pairs.phase[node])).name.lower(),
        "rank": pairs.rank,
        "from_layer": lowest.layer,
        "layers": layers,
        "of_layers": len(routers),
        "rows": rows,
    }
    return Evidence(EXPERTS, text, values)


def _place(operator: Operator) -> str:
    return operator.module if operator.layer is None else f"layer {operator.layer}"


def with_experts(findings: Sequence[Finding], fact: Evidence | None) -> tuple[Finding, ...]:
    """The findings; the first one that matters says which experts follow from it."""
    said = list(findings)
    place = next((index for index, finding in enumerate(said) if not finding.latent), None)
    if fact is not None and place is not None:
        said[place] = dataclasses.replace(said[place], evidence=(*said[place].evidence, fact))
    return tuple(said)


def named(fact: Evidence, decode: Collection[int], scoring: Collection[int]) -> Evidence:
    """`fact` with the experts' numbers of its row in both arms."""
    only = [sorted(set(a) - set(b)) for a, b in ((decode, scoring), (scoring, decode))]
    if any(only):
        words = [", ".join(map(str, numbers)) or "none" for numbers in only]
        more = f"There decode alone chose {words[0]}, scoring alone {words[1]}."
    elif list(decode) == list(scoring):
        more = "When its rows were fetched both arms chose the same ones: the choice does not repeat itself."
    else:
        more = "There the same experts come in another order."
    values = fact.values | {"decode_experts": list(decode), "scoring_experts": list(scoring)}
    return Evidence(fact.code, f"{fact.text} {more}", values)


def with_margin(
    fact: Evidence, decode: npt.NDArray[np.float64], scoring: npt.NDArray[np.float64]
) -> Evidence:
    """`fact` with the gate's margin at its row: `decode` and `scoring` [experts] are the router's logits.

    Where both arms chose the same experts there is nothing to explain. The margin is how far the last chosen
    expert's logit lies above the next one's. Where it is no larger than what the arms' logits move by against
    each other, that decides who is chosen.
    """
    experts = [fact.values.get(f"{arm}_experts") or () for arm in ("decode", "scoring")]
    chosen = len(experts[0])
    usable = decode.shape == scoring.shape and 0 < chosen < len(decode) and set(experts[0]) != set(experts[1])
    if not usable or not (np.isfinite(decode).all() and np.isfinite(scoring).all()):
        return fact
    ordered = np.sort(decode)[::-1]
    margin = float(ordered[chosen - 1] - ordered[chosen])
    moved = scoring - decode
    # Two experts change places by what their logits move against each other.
    shift = float(moved.max() - moved.min())
    values = fact.values | {"gate_margin": margin, "gate_shift": shift}
    said = f"The last chosen expert's logit lies {margin:.2g} above the next one's, and between the arms "
    said += f"logits move by up to {shift:.2g} against each other"
    said += (
        ": enough to change places."
        if shift >= margin
        else ": too little to change places, so more than these logits decides."
    )
    return Evidence(fact.code, f"{fact.text} {said}", values)
