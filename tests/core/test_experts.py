"""Which experts were chosen otherwise: the first layer, the first row, how many, and which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from klbench.core.comparison import ABSENT, Comparison, Pairs, Status
from klbench.core.experts import experts_chosen, named, with_experts, with_margin
from klbench.core.findings import Finding
from klbench.core.trace import Arm, Direction, Operator

ARGUMENTS = ("0", "topk_weights", "topk_ids")


def routed(*by_layer: str) -> Any:
    """A trace and comparison of one TopK a layer and rows 10, 11, ...: "=" equal, "x" differs, " " absent."""
    words = {"=": Status.EQUAL, "x": Status.DIFFERS, " ": ABSENT}
    operators, columns, status = [], [], []
    for layer, row in enumerate(by_layer):
        operators.append(Operator(f"model.layers.{layer}.mlp.topk", "TopK", 0, layer, False, None))
        for argument in (1, 2):
            columns.append((layer, int(Direction.OUT), argument))
            # Weights differ everywhere: that alone flips nothing.
            status.append([Status.DIFFERS if argument == 1 else words[letter] for letter in row])
    table = np.array(columns)
    rows = len(by_layer[0])
    trace: Any = SimpleNamespace(operators=tuple(operators), arguments=ARGUMENTS)
    numbers = np.arange(rows)
    arm = np.full(rows, Arm.GENERATION)
    pairs = Pairs(0, 0, numbers, numbers, numbers + 10, arm, numbers)
    return trace, pairs, Comparison(table[:, 0], table[:, 1], table[:, 2], np.array(status, dtype=np.int8))


def test_the_lowest_layer_the_first_row_and_its_layer_are_named() -> None:
    fact = experts_chosen(*routed("=====", " ==xx", "=x=xx", "====="))
    assert fact is not None
    assert fact.values["module"] == "model.layers.2.mlp.topk"
    assert (fact.values["layer"], fact.values["position"], fact.values["from_layer"]) == (2, 11, 1)
    assert (fact.values["layers"], fact.values["of_layers"], fact.values["rows"]) == (2, 4, 3)
    assert "2 of 4 layers, from layer 1 on; first at row 11, in layer 2; 3 rows of the request." in fact.text


def test_weights_alone_and_models_without_experts_say_nothing() -> None:
    assert experts_chosen(*routed("===", "=  ")) is None
    trace, pairs, comparison = routed("xx")
    trace.arguments = ("0", "topk_weights", "router_logits")
    assert experts_chosen(trace, pairs, comparison) is None


def test_the_experts_that_only_one_arm_chose_are_named() -> None:
    fact = experts_chosen(*routed("x"))
    assert fact is not None
    said = named(fact, [3, 9, 17, 30], [3, 9, 21, 17])
    assert said.text.endswith("There decode alone chose 30, scoring alone 21.")
    assert said.values["decode_experts"] == [3, 9, 17, 30]
    assert named(fact, [3, 9], [9, 3]).text.endswith("There the same experts come in another order.")
    assert named(fact, [3, 9], [3, 9]).text.endswith("the choice does not repeat itself.")


def test_a_gate_whose_margin_the_arms_differ_by_is_said_to_flip() -> None:
    fact = experts_chosen(*routed("x"))
    assert fact is not None
    said = named(fact, [0, 1], [0, 2])
    decode = np.array([3.0, 2.0, 1.75, 0.0])
    flipped = with_margin(said, decode, np.array([3.0, 1.875, 2.0, 0.0]))
    assert (flipped.values["gate_margin"], flipped.values["gate_shift"]) == (0.25, 0.375)
    assert flipped.text.endswith("logits move by up to 0.38 against each other: enough to change places.")
    # A shift of all logits alike changes no choice.
    assert "too little to change places" in with_margin(said, decode, decode + 1.0).text
    assert with_margin(said, decode, decode[:3]) == said
    unmoved = named(fact, [0, 1], [1, 0])
    assert with_margin(unmoved, decode, decode + 1.0) == unmoved
    assert with_margin(said, decode[:2], decode[:2]) == said
    assert with_margin(said, decode, decode * np.nan) == said


def finding(latent: bool) -> Finding:
    return Finding(
        ("operator",), "m", 0, 0, 0, 0, "generation", 0, "decode", 5, 1, "probable", latent, evidence=()
    )


def test_the_first_finding_that_matters_carries_it() -> None:
    fact = experts_chosen(*routed("x"))
    latent, first, second = with_experts([finding(True), finding(False), finding(False)], fact)
    assert [len(found.evidence) for found in (latent, first, second)] == [0, 1, 0]
    assert with_experts([finding(True)], fact)[0].evidence == ()
    assert with_experts([finding(False)], None)[0].evidence == ()
