"""Numbers, exported rows and recomputations are those of the row and the rank that the finding speaks of."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from klbench.core.alignment import align
from klbench.core.comparison import Pairs
from klbench.core.findings import Localisation
from klbench.core.localisation import localise
from klbench.core.trace import Phase, Trace
from klbench.engine.attention_rows import recompute_attention
from klbench.engine.ulp_rows import measure_ulps
from klbench.errors import KlbenchError
from tests.core.little_transformer import Model, Plant, on_ranks, run_retracted

TOKENS = list(range(5, 19))
PROMPT, ROW = 8, 9
DECODE_9, DECODE_10, RESUMED, DECODE_12, SCORING = 3, 4, 5, 6, 7
"""Numbers of forwards."""


class Reader:
    """Notes which rows it is asked for, and has none."""

    def __init__(self) -> None:
        self.wanted: list[dict[str, Any]] = []

    async def fetch_rows(self, dump_dir: Path, wanted: list[dict[str, Any]], out_file: Path) -> None:  # noqa: ARG002
        self.wanted += wanted
        raise KlbenchError("no rows here")

    def of(self, key: str, side: str) -> set[tuple[int, int, int]]:
        """(rank, forward, row in the batch) of what was asked for under `key` on one side."""
        return {
            (want["rank"], want["forward"], want["row_in_batch"])
            for want in self.wanted
            if want["key"].startswith(f"{key}/") and side in want["key"].split("/")
        }


def retracted(place: str, phase: Phase) -> Trace:
    """Rows 0 to 11 are computed once more after 8 to 10 were decoded; row 9 is wrong in `phase` alone."""
    plant = Plant(0, place, lambda _arm, position, now: position == ROW and now == phase)
    model = Model(2, plants=(plant,), observes_state=True)
    run_retracted(model, TOKENS, PROMPT)
    return model.trace()


def located(trace: Trace, ranks: int = 1) -> tuple[Localisation, dict[int, Pairs]]:
    alignments = [align(trace, 0, rank) for rank in range(ranks)]
    found = localise(trace, alignments, np.array([10, 13]), first_token=PROMPT)
    assert found.findings
    return found, {alignment.pairs.rank: alignment.pairs for alignment in alignments}


@pytest.mark.parametrize(
    ("phase", "forward", "row_in_batch"), [(Phase.RESUMED, RESUMED, ROW), (Phase.DECODE, DECODE_9, 0)]
)
def test_a_row_that_was_computed_twice_is_measured_as_it_was_found(
    phase: Phase, forward: int, row_in_batch: int, tmp_path: Path
) -> None:
    trace = retracted("up", phase)
    found, pairs = located(trace)
    assert (found.findings[0].phase, found.findings[0].first_position) == (phase.name.lower(), ROW)
    reader = Reader()

    asyncio.run(measure_ulps(reader, tmp_path, trace, found, pairs))  # type: ignore[arg-type]

    for key in ("finding/0", "beside/0", "around"):
        assert reader.of(key, "a") == {(0, forward, row_in_batch)}
    assert reader.of("finding/0", "b") == {(0, SCORING, ROW)}


def test_a_row_that_was_not_computed_like_that_again_has_no_numbers(tmp_path: Path) -> None:
    trace = retracted("up", Phase.RESUMED)
    found, pairs = located(trace)
    ours = pairs[0]
    kept = ours.phase != Phase.RESUMED
    names = ("decode_row", "scoring_row", "position", "arm", "phase")
    again = dataclasses.replace(ours, **{name: getattr(ours, name)[kept] for name in names})
    reader = Reader()

    assert asyncio.run(measure_ulps(reader, tmp_path, trace, found, {0: again})) == found  # type: ignore[arg-type]
    assert reader.wanted == []


def test_the_rows_are_those_of_the_findings_rank(tmp_path: Path) -> None:
    clean, wrong = retracted("none", Phase.DECODE), retracted("up", Phase.DECODE)
    trace = on_ranks(clean, wrong)
    found, pairs = located(trace, ranks=2)
    assert (found.findings[0].rank, found.around_rank) == (1, 1)
    reader = Reader()

    asyncio.run(measure_ulps(reader, tmp_path, trace, found, pairs))  # type: ignore[arg-type]

    assert reader.of("finding/0", "a") == reader.of("around", "a") == {(1, DECODE_9, 0)}


@pytest.mark.parametrize(
    ("phase", "rows"),
    [
        (Phase.RESUMED, [(RESUMED, 9), (RESUMED, 10), (RESUMED, 11), (DECODE_12, 0)]),
        (Phase.DECODE, [(DECODE_9, 0), (DECODE_10, 0)]),
    ],
)
def test_an_attention_is_recomputed_over_rows_that_follow_one_another(
    phase: Phase, rows: list[tuple[int, int]], tmp_path: Path
) -> None:
    trace = retracted("attn", phase)
    attention = {"class_name": "RadixAttention"}
    operators = tuple(
        dataclasses.replace(op, **attention) if op.module.endswith(".attn") else op for op in trace.operators
    )
    trace = dataclasses.replace(trace, operators=operators)
    found, pairs = located(trace)
    assert found.findings[0].module == "model.layers.0.attn"
    reader = Reader()

    asyncio.run(
        recompute_attention(reader, tmp_path, trace, found, pairs, {"head_dim": 1})  # type: ignore[arg-type]
    )

    asked = [reader.of(str(place), "a") for place in range(len(rows) + 1)]
    assert asked == [*({(0, *row)} for row in rows), set()]
