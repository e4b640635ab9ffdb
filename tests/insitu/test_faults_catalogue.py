"""The fault catalogue: readable without torch, and every fault can be spelled and read back."""

import subprocess
import sys

import pytest

from klbench.insitu.faults_catalogue import (
    ALL_HELPERS,
    CATALOGUE,
    PAIR_CATALOGUE,
    parse_fault,
    parse_faults,
    unfit,
)
from klbench.insitu.faults_truth import ALL_MODELS, FIRST_POSITIONS, NEEDS
from klbench.zoo import KINDS as MODELS
from klbench.zoo import layer_kinds

KINDS = {"operator", "gap", "state_write", "state_restore", "head"}


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_fault_reads_back_as_it_is_spelled(name: str) -> None:
    armed = parse_fault(name)
    assert armed.parameters == CATALOGUE[name].parameters
    assert parse_fault(armed.spelled) == armed
    assert parse_faults(armed.spelled) == (armed,)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_fault_has_a_truth_in_known_words_and_two_short_lines(name: str) -> None:
    armed = parse_fault(name)
    truth = armed.fault.truth
    assert set(truth.dirty_helpers) <= set(ALL_HELPERS)
    assert truth.dirty_helpers
    assert set(truth.kinds) <= KINDS
    assert set(truth.models) <= set(ALL_MODELS)
    assert truth.first in FIRST_POSITIONS
    assert set(truth.needs) <= set(NEEDS)
    assert truth.condition in ("batch_invariance", "different_function", "race")
    assert truth.fires
    assert "layer" not in armed.parameters or f"layers.{armed.parameters['layer']}." in armed.module
    assert all(len(line) <= 100 for line in armed.fault.explanation)
    # The rules that speak of a parameter need it.
    for parameter in ("rows", "after", "step", "interval", "tile"):
        assert truth.first != parameter or parameter in armed.parameters


def test_the_models_that_faults_speak_of_are_those_of_the_zoo() -> None:
    assert set(ALL_MODELS) == set(MODELS)


def test_the_three_faults_of_the_tour_come_first() -> None:
    assert list(CATALOGUE)[:3] == ["o_proj-rows", "restore-key", "decode-window"]


def test_parameters_change_one_by_one() -> None:
    armed = parse_fault(" o_proj-rows: rows=128 ")
    assert armed.parameters == {"layer": 1, "rows": 128, "unhooked": 0}
    assert armed.module == "model.layers.1.self_attn.o_proj"


def test_several_faults_are_joined_by_plus_and_a_pair_stands_for_its_two() -> None:
    two = parse_faults("o_proj-rows:layer=3+key-overwrite:layer=0")
    assert [armed.fault.name for armed in two] == ["o_proj-rows", "key-overwrite"]
    assert parse_faults("pair-outside") == two
    for pair in PAIR_CATALOGUE.values():
        assert len(parse_faults(pair.name)) == 2
        assert all(len(line) <= 100 for line in pair.explanation)


def test_every_fault_of_the_catalogue_can_be_planted_and_no_other() -> None:
    pytest.importorskip("torch")
    from klbench.insitu.faults import PLANTERS

    assert set(PLANTERS) == set(CATALOGUE)


def test_the_catalogue_imports_nothing_heavy() -> None:
    text = (
        "import sys, klbench.insitu.faults_catalogue; print(*{'torch', 'numpy', 'sglang'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout.strip() == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "there are: o_proj-rows, restore-key, decode-window"),
        ("restore-key:row=1", "it has: layer, back"),
        ("log-of-softmax:layer=1", "it has: none"),
        ("restore-key:back=-1", "is a whole number, not '-1'"),
        ("restore-key:back", "is a whole number, not ''"),
        ("restore-key+nothing", "no fault 'nothing'"),
    ],
)
def test_what_cannot_be_planted_is_refused_with_what_can(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_faults(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("o_proj-rows:rows=0", "parameter rows of fault o_proj-rows is at least 1, not 0"),
        ("restore-key:modulus=0", "parameter modulus of fault restore-key is at least 1, not 0"),
        ("restore-key:back=0", "parameter back of fault restore-key is at least 1"),
        ("restore-residue:modulus=4,residue=4", "parameter residue .* is between 0 and 3, not 4"),
        ("attention-prompt:tile=1", "parameter tile of fault attention-prompt is at least 2"),
        ("collective-order:ranks=2", "parameter ranks of fault collective-order is at least 3"),
        ("conv-rounded:bits=7", "parameter bits of fault conv-rounded is between 1 and 6"),
        ("race:odds=0", "parameter odds of fault race is at least 1"),
        ("o_proj-rows:unhooked=2", "parameter unhooked of fault o_proj-rows is between 0 and 1"),
    ],
)
def test_parameters_with_which_a_fault_could_not_act_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_faults(text)


DENSE = ("full_attention",) * 4
SWA = (*("sliding_attention",) * 3, "full_attention")
HYBRID = ("conv", "full_attention", "full_attention", "conv")


@pytest.mark.parametrize(
    ("text", "model", "layers", "says"),
    [
        ("o_proj-rows:layer=3", "dense", DENSE, None),
        ("o_proj-rows:layer=4", "dense", DENSE, "the dense model has layers 0 to 3"),
        ("log-of-softmax", "hybrid", HYBRID, None),
        ("router-rows", "dense", DENSE, "no place in the dense model; it has in: moe"),
        ("conv-zeroed:layer=3", "hybrid", HYBRID, None),
        ("conv-zeroed:layer=1", "hybrid", HYBRID, "whose kind is full_attention; it fits layer 0, 3"),
        ("restore-key:layer=0", "hybrid", HYBRID, "whose kind is conv; it fits layer 1, 2"),
        ("window-short:layer=3", "swa", SWA, "whose kind is full_attention; it fits layer 0, 1, 2"),
    ],
)
def test_a_fault_without_a_place_in_the_model_says_where_it_has_one(
    text: str, model: str, layers: tuple[str, ...], says: str | None
) -> None:
    why = unfit(parse_fault(text), model, layers)
    assert why is says if says is None else says in str(why)


@pytest.mark.parametrize("name", CATALOGUE)
def test_with_its_defaults_a_fault_fits_each_model_that_it_is_for(name: str) -> None:
    for model in CATALOGUE[name].truth.models:
        assert unfit(parse_fault(name), model, layer_kinds(model)) is None  # type: ignore[arg-type]


def test_each_pair_fits_its_models() -> None:
    for pair in PAIR_CATALOGUE.values():
        for model in pair.models:
            assert [unfit(armed, model, layer_kinds(model)) for armed in parse_faults(pair.name)] == [
                None
            ] * 2  # type: ignore[arg-type]
