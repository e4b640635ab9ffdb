"""A few faults of each family on one live server: armed, located where they are, gone without a trace."""

import argparse

import pytest

pytest.importorskip("torch")

from tests.lab.matrix import run_matrix

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

FAULTS = (
    *("restore-value", "key-write", "key-overwrite", "residual-gap"),
    *("lm_head-rows", "attention-prompt", "pair-outside", "pair-inside"),
)


async def test_planted_faults_are_named_by_kind_module_layer_and_first_row() -> None:
    arguments = argparse.Namespace(
        model="dense",
        faults=",".join(FAULTS),
        batch=4,
        prompt_tokens=160,
        new_tokens=24,
        shared_prefix=0,
        backend="digest",
        flags=[],
        traces=None,
    )
    rows = await run_matrix(arguments)
    assert len(rows) == len(FAULTS)
    assert {row.fault: (row.answer, row.why) for row in rows if row.answer != "right"} == {}
    assert {row.fault: row.dirty for row in rows if row.helpers != "right"} == {}
    assert all(row.clean_again and row.fired for row in rows)
