"""Two attentions that differ: rounded otherwise, or of other keys? The inputs themselves tell."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from klbench.core.attention_reference import AttentionRows, judge_attention

HEADS, KV_HEADS, DEPTH, KEYS = 4, 2, 32, 240
SCALE = DEPTH**-0.5
BF16 = 7
Floats = npt.NDArray[np.float64]


def bf16(values: Floats) -> Floats:
    """Rounded to bfloat16."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


class Attention:
    """Seeded rows with equal inputs in both arms, and ways to compute their attention."""

    def __init__(self, seed: int, sharpness: float = 1.0) -> None:
        random = np.random.Generator(np.random.PCG64(seed))
        self.positions = np.arange(KEYS - 12, KEYS)
        self.queries = bf16(random.standard_normal((12, HEADS, DEPTH)) * sharpness)
        self.keys = bf16(random.standard_normal((KEYS, KV_HEADS, DEPTH)))
        self.values = bf16(random.standard_normal((KEYS, KV_HEADS, DEPTH)))

    def out(self, keys_of: Any, block: int | None = None) -> Floats:
        """[12, heads, depth] in bfloat16 over the keys `keys_of(position)`, in rounded blocks or at once."""
        rows = []
        for row, position in enumerate(self.positions):
            chosen = np.asarray(keys_of(int(position)))
            heads = []
            for head in range(HEADS):
                scores = self.keys[chosen, head // 2] @ self.queries[row, head] * SCALE
                weights = np.exp(scores - scores.max())
                values = self.values[chosen, head // 2]
                edges = range(0, len(chosen), block or len(chosen))
                parts = [slice(start, start + (block or len(chosen))) for start in edges]
                sums = [weights[part].sum() for part in parts]
                outs = [bf16(weights[p] @ values[p] / s) for p, s in zip(parts, sums, strict=True)]
                if block is None:
                    outs = [weights @ values / sums[0]]
                heads.append(sum(o * s for o, s in zip(outs, sums, strict=True)) / sum(sums))
            rows.append(np.stack(heads))
        return bf16(np.stack(rows))

    def rows(self, decode: Floats, scoring: Floats) -> AttentionRows:
        return AttentionRows(self.positions, self.queries, self.keys, self.values, 0, decode, scoring, BF16)


def whole(position: int) -> list[int]:
    return list(range(position + 1))


def judged(rows: AttentionRows, window: int | None = None) -> Any:
    return judge_attention(rows, scales=(1.0, SCALE), window=window)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sharpness", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_blocks_that_are_rounded_alone_are_rounding(seed: int, sharpness: float, block: int) -> None:
    attention = Attention(seed, sharpness)
    found = judged(attention.rows(attention.out(whole, block), attention.out(whole)))
    assert found.verdict == "rounding"
    assert found.scoring_u <= 1.0 < found.decode_u <= 4.0 or found.decode_u <= 1.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sharpness", [0.2, 1.0])
@pytest.mark.parametrize("back", [1, 3, 100])
def test_a_key_that_decode_misses_is_named(seed: int, sharpness: float, back: int) -> None:
    attention = Attention(seed, sharpness)
    missed = attention.out(lambda position: [key for key in whole(position) if key != position - back])
    found = judged(attention.rows(missed, attention.out(whole)))
    assert (found.verdict, found.side, found.back) == ("missing_key", "generation", back)
    # The other way round it is the scoring arm.
    found = judged(attention.rows(attention.out(whole), missed))
    assert (found.verdict, found.side, found.back) == ("missing_key", "scoring", back)


def test_a_key_of_one_position_is_named_by_it() -> None:
    attention = Attention(5)
    missed = attention.out(lambda position: [key for key in whole(position) if key != 17])
    found = judged(attention.rows(missed, attention.out(whole)))
    assert (found.verdict, found.at, found.back) == ("missing_key", 17, None)


@pytest.mark.parametrize(("slip", "verdict", "back"), [(-1, "missing_key", 64), (1, "extra_key", 65)])
def test_a_window_that_is_one_off_is_named(slip: int, verdict: str, back: int) -> None:
    attention = Attention(6)
    right = attention.out(lambda position: range(position - 64, position + 1))
    slipped = attention.out(lambda position: range(position - 64 - slip, position + 1))
    found = judged(attention.rows(slipped, right), window=64)
    assert (found.verdict, found.side, found.back) == (verdict, "generation", back)


def test_other_keys_altogether_are_another_function() -> None:
    attention = Attention(7)
    other = attention.out(lambda position: whole(position)[::2])
    found = judged(attention.rows(other, attention.out(whole)))
    assert (found.verdict, found.side) == ("other_function", "generation")


def test_an_operator_that_does_more_than_attention_is_not_judged() -> None:
    attention = Attention(8)
    sinks = attention.out(whole) * 0.7
    found = judged(attention.rows(sinks, bf16(sinks * 1.01)))
    assert found.verdict == "unknown"


def test_one_row_alone_is_not_enough_to_exclude_a_key() -> None:
    attention = Attention(9)
    rows = attention.rows(attention.out(whole, 64), attention.out(whole))
    one = AttentionRows(
        rows.positions[:1],
        rows.queries[:1],
        rows.keys,
        rows.values,
        0,
        rows.decode_out[:1],
        rows.scoring_out[:1],
        BF16,
    )
    assert judged(one).verdict == "unknown"
