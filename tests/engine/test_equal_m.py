"""What decode against a one-token extend says: never a condition that its verdict may not have."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from klbench.core.findings import Finding
from klbench.core.trace import Arm, Phase
from klbench.engine import equal_m
from klbench.engine.captured_work import ServerSide, Work
from klbench.engine.equal_m import MEANS, row_for, try_equal_m
from tests.core.little_transformer import Model
from tests.core.test_confirmation import FINDING

PROMPT, TOKENS = 100, 50


@pytest.mark.parametrize("outcome", ["same_bits", "differs"])
def test_of_an_operator_that_reads_state_a_difference_leaves_both_conditions(outcome: str) -> None:
    said = MEANS[outcome, True]
    assert ("condition 1" in said and "condition 2" in said) == (outcome == "differs")
    assert ("the row count matters" in said) == (outcome == "same_bits")


@pytest.mark.parametrize("stateful", [True, False])
def test_what_differs_with_one_row_each_is_not_put_on_their_number(stateful: bool) -> None:
    assert MEANS["differs", stateful].startswith("other bits. It is not the number of rows: decode")


def asked(first: int) -> tuple[Work, Finding]:
    """A request of 100 prompt tokens that generated 50: decode computed the rows 100 to 148."""
    measured: Any = SimpleNamespace(prompt_len=np.array([PROMPT]), output_len=np.array([TOKENS]))
    work = Work("match", prompts=[()], request=0, measured=measured, max_new_tokens=TOKENS)
    return work, replace(FINDING, first_position=first)


@pytest.mark.parametrize(
    ("first", "page_size", "interval", "row"),
    [
        (100, 1, None, 100),
        (101, 16, None, 112),
        (3, 1, None, 100),
        # Behind a whole interval, too, where there is such a row; else behind whole pages.
        (100, 1, 64, 128),
        (100, 16, 64, 128),
        (129, 1, 64, 129),
        (100, 16, 256, 112),
        (100, 16, 24, 144),
        (100, 10, 24, 120),
        (147, 16, None, None),
        (149, 1, 64, None),
    ],
)
def test_the_row_stands_where_the_cache_ends(
    first: int, page_size: int, interval: int | None, row: int | None
) -> None:
    assert row_for(*asked(first), page_size, interval) == row


@pytest.mark.parametrize(
    ("page_size", "interval", "said"),
    [
        (1, None, "(page size 1)."),
        (1, 64, "(page size 1, recurrent state each 64 tokens or where a sequence ended)."),
        (16, None, "(page size 16; --page-size 1 allows it likeliest)."),
    ],
)
def test_a_cache_that_ends_elsewhere_says_what_is_kept_and_recommends_no_page_size_that_it_has(
    page_size: int, interval: int | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    async def cached(_side: ServerSide, _work: Work, row: int, _folder: Path) -> int:
        rows.append(row)
        return 96

    monkeypatch.setattr(equal_m, "_both", cached)
    side: Any = SimpleNamespace(page_size=page_size, checkpoint_interval=interval)
    fact = asyncio.run(try_equal_m(side, *asked(101), folder=tmp_path / "made"))
    assert fact.values["outcome"] == "not_possible"
    assert fact.text.endswith(f"the extend had {rows[0] - 95} rows {said}")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("page_size", [1, 16])
def test_without_such_a_row_only_another_page_size_is_recommended(page_size: int, tmp_path: Path) -> None:
    side: Any = SimpleNamespace(page_size=page_size, checkpoint_interval=None)
    fact = asyncio.run(try_equal_m(side, *asked(149), folder=tmp_path / "made"))
    assert fact.values["outcome"] == "not_possible"
    assert ("--page-size 1" in fact.text) == (page_size != 1)
    assert "more generated tokens" in fact.text


@pytest.mark.parametrize("overlap", [False, True])
def test_what_an_overlap_scheduler_decodes_behind_the_row_does_not_matter(overlap: bool) -> None:
    model, tokens, row = Model(2), [4, 9, 2, 7, 7, 1, 3, 8], 7
    model.extend(Arm.GENERATION, tokens[:6], 0, Phase.EXTEND)
    for position in (6, row):
        model.decode(Arm.GENERATION, tokens[position], position)
    if overlap:
        model.decode(Arm.GENERATION, 5, row + 1)
    model.extend(Arm.SCORING, tokens[row:], row, Phase.RESTORED)
    if overlap:
        model.decode(Arm.SCORING, 6, row + 1)
    finding = replace(FINDING, module="model.layers.1.qkv", call=0, rank=0)
    said = equal_m._read(model.trace(), 0, finding, row)
    assert said.values == {
        "row": row, "decode_M": 1, "extend_M": 1, "stateful": False, "outcome": "same_bits"
    }  # fmt: skip
