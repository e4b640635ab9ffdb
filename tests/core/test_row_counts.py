"""The same first rows in cold forwards of other row counts: what follows their number, and what does not."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from klbench.core.findings import Evidence, Finding
from klbench.core.row_counts import Site, judge_row_counts, read_rungs, row_counts_evidence
from klbench.core.trace import Arm, Phase

sys.path.insert(0, str(Path(__file__).parent))
from little_transformer import Model, Plant

O_PROJ = "model.layers.1.o"
ROWS = (4, 8, 16, 8, 16, 4)
CONTENTS = (0, 0, 0, 1, 1, 0)


def judged(site, when, place="o", layer=1, rows=ROWS, arms=(4, 16)):
    """Forwards of `rows` rows that begin with the same four; `when(rows, others)` says where a plant acts."""
    now = {}
    model = Model(2, plants=(Plant(layer, place, lambda *_: when(now["rows"], now["content"])),))
    for count, content in zip(rows, CONTENTS, strict=True):
        now.update(rows=count, content=content)
        tail = [100 * (content + 1) + place for place in range(count - 4)]
        model.extend(Arm.SCORING, [1, 2, 3, 4, *tail], 0, Phase.EXTEND)
    rungs = read_rungs(model.trace(), site, rank=0, request=0, positions=(2, 3), contents=CONTENTS)
    return judge_row_counts(rungs, arms)


def test_bits_that_follow_the_number_of_rows_are_named_with_it():
    found = judged(Site(O_PROJ, 0, gap=False), lambda rows, _: rows >= 16)

    assert (found.outcome, found.tried, found.changed) == ("changes", (4, 8, 16), (16,))
    assert (found.arms_differ, found.positions) == (True, (2, 3))
    text = row_counts_evidence(found, O_PROJ).text
    assert "the same bits with 4, 8 rows and others with 16, whatever the rows behind them hold" in text


def test_a_gap_is_judged_by_what_comes_out_of_it():
    behind = Site("model.layers.1.norm2", 0, gap=True)

    assert judged(behind, lambda rows, _: rows >= 8, place="residual").changed == (8, 16)
    # The operator behind it is another place.
    assert judged(Site("model.layers.1.norm2", 0, gap=False), lambda *_: False).outcome == "same_bits"


def test_rows_that_do_not_matter_are_said_not_to():
    found = judged(Site(O_PROJ, 0, gap=False), lambda *_: False)

    assert (found.outcome, found.changed, found.arms_differ) == ("same_bits", (), False)


def test_a_change_at_row_counts_that_no_arm_had_explains_nothing():
    found = judged(Site(O_PROJ, 0, gap=False), lambda rows, _: rows == 8)

    assert (found.outcome, found.changed, found.arms_differ) == ("same_bits", (8,), False)


def test_an_arm_that_had_more_rows_than_were_tried_leaves_it_to_what_changed():
    site = Site(O_PROJ, 0, gap=False)

    assert judged(site, lambda rows, _: rows >= 8, arms=(4, 900)).outcome == "changes"
    assert judged(site, lambda *_: False, arms=(4, 900)).outcome == "same_bits"


def test_what_other_rows_hold_is_told_from_how_many_there_are():
    found = judged(Site(O_PROJ, 0, gap=False), lambda _, content: content == 1)

    assert found.outcome == "other_rows"


def test_a_server_that_does_not_repeat_itself_proves_nothing():
    calls = iter(range(10_000))
    found = judged(Site(O_PROJ, 0, gap=False), lambda rows, _: rows == 4 and next(calls) >= 4)

    assert found.outcome == "not_repeated"


def test_what_has_other_inputs_is_not_compared():
    found = judged(Site(O_PROJ, 0, gap=False), lambda rows, _: rows > 4, layer=0)

    assert found.outcome == "not_possible"
    assert "its inputs, or its state, were not equal either" in row_counts_evidence(found, O_PROJ).text


def test_forwards_that_were_not_all_captured_are_refused():
    model = Model(1)
    model.extend(Arm.SCORING, [1, 2, 3], 0, Phase.EXTEND)
    with pytest.raises(ValueError, match="captured in 1 forwards, not 2"):
        read_rungs(
            model.trace(), Site("model.norm", 0, gap=False), rank=0, request=0, positions=[1], contents=[0, 0]
        )


def test_the_place_of_a_gap_is_what_lies_behind_it():
    finding = Finding(
        kinds=("gap",),
        module="model.layers.1.o -> model.layers.1.norm2",
        call=0,
        operator=3,
        layer=1,
        request=0,
        arm="generation",
        rank=0,
        phase="decode",
        first_position=9,
        count=1,
        grade="probable",
        latent=False,
        evidence=(Evidence("origin", "", {}),),
    )
    assert Site.of(finding) == Site("model.layers.1.norm2", 0, gap=True)
    assert Site.of(replace(finding, kinds=("operator",), module=O_PROJ)) == Site(O_PROJ, 0, gap=False)
