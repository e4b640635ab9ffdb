"""The row digest: bits in, 128 bits out, the same everywhere and different for every kind of difference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from klbench.core import digests as reference  # noqa: E402
from klbench.insitu.digest import digest_rows, finished, row_sums, rows_at, sums_of_pieces  # noqa: E402

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def of_bytes(rows: list[bytes]) -> list[tuple[int, int]]:
    tensor = torch.tensor([list(row) for row in rows], dtype=torch.uint8)
    return [(int(low), int(high)) for low, high in digest_rows(tensor, len(rows))]


def of(*tensors: "torch.Tensor") -> list[tuple[int, int]]:
    return [tuple(int(half) for half in digest_rows(tensor, 1)[0]) for tensor in tensors]  # type: ignore[misc]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_torch_and_numpy_compute_the_same_digest(rows: int, row_bytes: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size=(rows, row_bytes), dtype=np.uint8)

    ours = digest_rows(torch.from_numpy(data), rows).numpy().view(np.uint64)

    np.testing.assert_array_equal(ours, reference.digest_rows(data))


@settings(deadline=None)
@given(st.lists(st.binary(min_size=0, max_size=24), min_size=2, max_size=12, unique=True))
def test_different_rows_have_different_digests_also_where_only_the_length_differs(rows: list[bytes]) -> None:
    found = [tuple(reference.digest_rows(np.frombuffer(r, np.uint8).reshape(1, -1))[0]) for r in rows]

    assert len(set(found)) == len(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_digests_the_same_whatever_shares_the_call(dtype: "torch.dtype") -> None:
    bits = torch.randint(0, 2, (37, 24), dtype=torch.uint8)
    tensor = bits.bool() if dtype == torch.bool else bits.view(torch.uint8).view(dtype)

    together = digest_rows(tensor, 37)

    for row in (0, 1, 36):
        assert torch.equal(digest_rows(tensor[row : row + 1], 1)[0], together[row])
    assert torch.equal(digest_rows(tensor.t().contiguous().t(), 37), together)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_seen_in_both_halves_at_every_place(dtype: "torch.dtype") -> None:
    raw = torch.zeros(40, dtype=torch.uint8)
    rows = [raw] + [raw.clone() for _ in range(40)]
    for place, row in enumerate(rows[1:]):
        row[place] = 1
    found = of(*[(r.bool() if dtype == torch.bool else r.view(dtype)) for r in rows])

    assert len({low for low, _ in found}) == len({high for _, high in found}) == 41


def test_sign_flips_of_any_number_of_elements_differ() -> None:
    row = torch.randn(64).bfloat16()
    flips = [row.clone() for _ in range(65)]
    for count, flipped in enumerate(flips):
        flipped[:count] = -flipped[:count]
    two_lanes = row.clone()
    two_lanes[[3, 7]] = -two_lanes[[3, 7]]

    assert len(set(of(*flips, two_lanes))) == 66


def test_swapped_elements_lanes_and_halves_differ() -> None:
    row = torch.arange(1, 33, dtype=torch.float32)
    swapped = row.clone()
    swapped[[0, 1]] = row[[1, 0]]
    lanes = row.view(-1, 2).flip(0).reshape(-1)
    halves = torch.cat([row[16:], row[:16]])
    twice = torch.cat([row[:16], row[:16]])

    assert len(set(of(row, swapped, lanes, halves, twice, row.flip(0)))) == 6


def test_zero_rows_of_different_lengths_and_signed_zeros_differ() -> None:
    zeros = [torch.zeros(length, dtype=torch.bfloat16) for length in range(30)]

    assert len(set(of(*zeros, -torch.zeros(8, dtype=torch.bfloat16)))) == 31


def test_a_wide_row_is_digested_in_blocks_to_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3, 400)
    whole = digest_rows(tensor, 3)

    monkeypatch.setattr("klbench.insitu.digest._LANE_LIMIT", 7)

    assert torch.equal(digest_rows(tensor, 3), whole)


def test_a_view_into_a_larger_tensor_digests_as_its_copy() -> None:
    large = torch.randn(5, 33).bfloat16()

    assert torch.equal(digest_rows(large[1:4, 3:30], 3), digest_rows(large[1:4, 3:30].clone(), 3))
    assert torch.equal(digest_rows(large[1:2, 1:9], 1), digest_rows(large[1:2, 1:9].clone(), 1))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), min_size=1, max_size=6), st.integers(0, 99))
def test_many_small_pieces_are_summed_together_as_each_alone(
    shapes: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randint(-(2**62), 2**62, shape, generator=generator) for shape in shapes]

    together = sums_of_pieces(pieces)

    assert torch.equal(together, torch.cat([row_sums(piece) for piece in pieces], dim=1))
    assert torch.equal(
        finished(together[:, : shapes[0][0]], shapes[0][1] * 8), digest_rows(pieces[0], shapes[0][0])
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_gathered_rows_keep_their_bits_and_their_dtype(dtype: "torch.dtype") -> None:
    values = torch.randint(0, 256, (9, 4, 16), dtype=torch.uint8).view(dtype)
    chosen = rows_at(values, torch.tensor([7, 0, 7]))
    assert chosen.dtype == dtype
    for place, row in enumerate((7, 0, 7)):
        assert torch.equal(chosen[place].view(torch.uint8), values[row].view(torch.uint8))
