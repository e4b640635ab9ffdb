"""How a difference is put into words: how much, by how much, and how it lies in the row."""

import numpy as np
import pytest

from klbench.core.experts import EXPERTS
from klbench.core.findings import Evidence, Finding
from klbench.core.ulps import compare_rows
from klbench.engine.ulp_rows import _with_names, head_size, in_words

HEADS, SIZE = 4, 16


def words(changed: dict[int, float], part_size: int | None = SIZE) -> str:
    a = np.ones(HEADS * SIZE, dtype=np.float32)
    b = a.copy()
    for place, value in changed.items():
        b[place] = value
    found = compare_rows("float32", a.view(np.uint8), b.view(np.uint8), part_size)
    assert found is not None
    return in_words(found)


ULP = float(np.nextafter(np.float32(1), np.float32(2)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {3: ULP},
            "1 of 64 elements differ, by 1 ulp at most, scattered, in 1 of 4 heads: as rounding does.",
        ),
        (
            {0: ULP, 20: ULP, 40: ULP, 60: ULP},
            "4 of 64 elements differ, by 1 ulp at most, scattered: as rounding does.",
        ),
        (
            dict.fromkeys(range(16, 32), 3.0),
            "16 of 64 elements differ, by 8388608 ulps at most, 1 whole of 4 heads: more than rounding.",
        ),
        (
            dict.fromkeys(range(18, 28), 3.0),
            "10 of 64 elements differ, by 8388608 ulps at most, 10 of them side by side, in 1 of 4 heads: "
            "more than rounding.",
        ),
        (
            dict.fromkeys(range(64), 3.0),
            "64 of 64 elements differ, by 8388608 ulps at most, the whole row: more than rounding.",
        ),
        (
            {0: 1.5, 20: ULP},
            "2 of 64 elements differ, by 4194304 ulps at most, scattered, in 2 of 4 heads.",
        ),
        (
            dict.fromkeys(range(64), ULP),
            "64 of 64 elements differ, by 1 ulp at most, the whole row.",
        ),
        (
            {5: float("nan")},
            "1 of 64 elements differ, scattered, in 1 of 4 heads; 1 are NaN or infinite in one arm: "
            "more than rounding.",
        ),
    ],
)
def test_a_difference_is_said_with_its_size_and_its_shape(changed: dict[int, float], said: str) -> None:
    assert words(changed) == said


@pytest.mark.parametrize("part_size", [None, 0, 24, 64])
def test_a_row_that_is_not_made_of_heads_has_none(part_size: int | None) -> None:
    said = words(dict.fromkeys(range(16, 32), 3.0), part_size)
    assert "16 of them side by side" in said
    assert "head" not in said


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"head_dim": 32, "hidden_size": 4096, "num_attention_heads": 32}, 32),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4}}, 16),
        ({"hidden_size": 65, "num_attention_heads": 4}, None),
        ({"hidden_size": 64, "num_attention_heads": 0}, None),
        ({"head_dim": "wide"}, None),
        ({}, None),
    ],
)
def test_the_size_of_a_head_is_the_models(config: dict[str, object], size: int | None) -> None:
    assert head_size(config) == size


def ids(*experts: int) -> tuple[str, np.ndarray]:
    return "int32", np.array(experts, dtype=np.int32).view(np.uint8)


def test_the_experts_of_a_row_are_the_integers_that_its_router_put_out() -> None:
    fact = Evidence(EXPERTS, "Tokens go elsewhere.", {})
    other = Evidence("origin", "Here.", {})
    finding = Finding(
        ("operator",), "m", 0, 0, 0, 0, "generation", 0, "decode", 5, 1, "probable", False, (other, fact)
    )
    weights = ("float32", np.ones(2, dtype=np.float32).view(np.uint8))
    rows = {
        f"{EXPERTS}/0/0/a": weights,
        f"{EXPERTS}/0/0/b": weights,
        f"{EXPERTS}/0/1/a": ids(3, 17),
        f"{EXPERTS}/0/1/b": ids(3, 9),
        "finding/0/0/a": ids(1, 2),
    }
    named = _with_names(finding, rows)
    assert named.evidence[0] == other
    assert named.evidence[1].text == "Tokens go elsewhere. There decode alone chose 17, scoring alone 9."
    assert _with_names(finding, {f"{EXPERTS}/0/1/a": ids(3, 17)}) == finding
    gate = np.array([4.0, 3.0, 2.5, 0.0], dtype=np.float32)
    logits = {f"{EXPERTS}/1/1/a": gate, f"{EXPERTS}/1/1/b": gate + np.array([0, 0, 1, 0], dtype=np.float32)}
    told = _with_names(
        finding, rows | {name: ("float32", row.view(np.uint8)) for name, row in logits.items()}
    )
    assert (told.evidence[1].values["gate_margin"], told.evidence[1].values["gate_shift"]) == (0.5, 1.0)
