"""The fault catalogue: readable without torch, and every fault can be spelled and read back."""

import pytest

from klbench.insitu.faults_catalogue import ALL_HELPERS, CATALOGUE, parse_fault


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_fault_reads_back_as_it_is_spelled(name: str) -> None:
    armed = parse_fault(name)
    assert armed.parameters == CATALOGUE[name].parameters
    assert parse_fault(armed.spelled) == armed
    assert set(armed.fault.truth.dirty_helpers) <= set(ALL_HELPERS)
    assert f"layers.{armed.parameters['layer']}." in armed.module
    assert all(len(line) <= 100 for line in armed.fault.explanation)


def test_parameters_change_one_by_one() -> None:
    armed = parse_fault(" o_proj-rows: rows=128 ")
    assert armed.parameters == {"layer": 1, "rows": 128}
    assert armed.module == "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "there are: o_proj-rows, restore-key, decode-window"),
        ("restore-key:row=1", "it has: layer, back"),
        ("restore-key:back=-1", "is a whole number, not '-1'"),
        ("restore-key:back", "is a whole number, not ''"),
    ],
)
def test_what_cannot_be_planted_is_refused_with_what_can(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_fault(text)
