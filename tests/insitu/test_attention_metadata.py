"""What an attention backend was told is held to the request's own length and slots."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu.attention_metadata import LENGTH, SLOTS, verdicts  # noqa: E402

PREFIX, LENGTHS = [0, 8, 4], [6, 12, 5]
ARMED = [0, 2]
"""Places of the armed requests among the batch's three."""


def pool(page: int) -> Any:
    """[requests, positions] pool slots: whole pages at scattered places."""
    pages = torch.randperm(3 * 16 // page + 7, generator=torch.Generator().manual_seed(3)) + 1
    table = pages[: 3 * 16 // page].reshape(3, -1)
    return (table[:, :, None] * page + torch.arange(page)).reshape(3, -1)


def asked(table: Any, decode: bool) -> tuple[Any, ...]:
    """(expected, places, positions, slots) of the armed requests."""
    places = torch.cat([torch.full((LENGTHS[i],), i) for i in ARMED])
    positions = torch.cat([torch.arange(LENGTHS[i]) for i in ARMED])
    expected = (ARMED, [PREFIX[i] for i in ARMED], [LENGTHS[i] for i in ARMED], decode)
    return expected, places, positions, table[places, positions]


class TorchNativeAttnBackend:
    forward_metadata = None


class FlashAttentionBackend:
    def __init__(self, table: Any, page: int) -> None:
        self.page_size = page
        self.forward_metadata = SimpleNamespace(
            cache_seqlens_int32=torch.tensor(LENGTHS, dtype=torch.int32),
            page_table=(table[:, ::page] // page).to(torch.int32),
        )


class TritonAttnBackend:
    def __init__(self, table: Any, decode: bool) -> None:
        keys = LENGTHS if decode else PREFIX
        ends = torch.tensor([0, *torch.tensor(keys).cumsum(0).tolist()], dtype=torch.int32)
        indices = torch.cat([table[i, : keys[i]] for i in range(3)])
        self.forward_metadata = SimpleNamespace(kv_indptr=ends, kv_indices=indices)


def batch() -> Any:
    return SimpleNamespace(
        seq_lens=torch.tensor(LENGTHS),
        extend_prefix_lens=torch.tensor(PREFIX),
        extend_seq_lens=torch.tensor(LENGTHS) - torch.tensor(PREFIX),
        forward_mode="extend",
    )


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("page", [1, 4])
def test_right_metadata_is_right_in_every_backend(decode: bool, page: int) -> None:
    table = pool(page)
    backends = [
        TorchNativeAttnBackend(),
        FlashAttentionBackend(table, page),
        TritonAttnBackend(table, decode),
    ]
    for backend in backends:
        found = verdicts(backend, batch(), *asked(table, decode))
        assert found is not None, backend
        assert found.tolist() == [0, 0], backend


def test_a_wrong_length_is_told_of_its_request_alone() -> None:
    table = pool(1)
    flash = FlashAttentionBackend(table, 1)
    flash.forward_metadata.cache_seqlens_int32[2] -= 1
    native = batch()
    native.seq_lens[2] += 1

    assert verdicts(flash, batch(), *asked(table, True)).tolist() == [0, LENGTH]
    assert verdicts(TorchNativeAttnBackend(), native, *asked(table, True)).tolist() == [0, LENGTH]
    # In an extend the length is the prefix and the new rows, too.
    assert verdicts(TorchNativeAttnBackend(), native, *asked(table, False)).tolist() == [0, LENGTH]


@pytest.mark.parametrize("page", [1, 4])
def test_slots_of_another_request_are_seen(page: int) -> None:
    table = pool(page)
    flash = FlashAttentionBackend(table, page)
    flash.forward_metadata.page_table[0, 0] = flash.forward_metadata.page_table[1, 0]
    triton = TritonAttnBackend(table, True)
    triton.forward_metadata.kv_indices[LENGTHS[0] + LENGTHS[1]] = table[0, 0]

    assert verdicts(flash, batch(), *asked(table, True)).tolist() == [SLOTS, 0]
    assert verdicts(triton, batch(), *asked(table, True)).tolist() == [0, SLOTS]


def test_what_lies_behind_the_length_does_not_matter() -> None:
    table = pool(1)
    flash = FlashAttentionBackend(table, 1)
    flash.forward_metadata.page_table[0, LENGTHS[0] :] = 0

    assert verdicts(flash, batch(), *asked(table, True)).tolist() == [0, 0]


def test_backends_that_choose_another_are_looked_through_and_unknown_ones_said() -> None:
    table = pool(1)
    hybrid = SimpleNamespace(_select_backend=lambda _mode: FlashAttentionBackend(table, 1))
    linear = SimpleNamespace(full_attn_backend=hybrid)

    assert verdicts(linear, batch(), *asked(table, True)).tolist() == [0, 0]
    assert verdicts(SimpleNamespace(), batch(), *asked(table, True)) is None
