"""What a forward was made of: ids, phases, the log and its comparison with a measured run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.engine.compositions import compare_compositions, read_compositions
from klbench.errors import KlbenchError
from klbench.insitu.composition import Composition, CompositionLog, CompositionReader
from klbench.insitu.rids import ARM_LETTERS, RequestId, parse_rid

NONCE = "a1b2"


class Mode(SimpleNamespace):
    def is_decode(self) -> bool:
        return bool(self.name == "DECODE")

    def is_mixed(self) -> bool:
        return bool(self.name == "MIXED")


class Rows(list[int]):
    """Stands for a tensor: a length and a shape."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def tolist(self) -> list[int]:
        return list(self)


def rid(request: int, arm: str = "generation", number: int = 1, armed: bool = False) -> str:
    return str(RequestId(NONCE, number, arm, armed, request))


def extend(*parts: tuple[str, int, int], mode: str = "EXTEND") -> Any:
    """A forward of (id, prefix length, rows)."""
    return SimpleNamespace(
        forward_mode=Mode(name=mode),
        rids=[part[0] for part in parts],
        input_ids=Rows([0] * sum(part[2] for part in parts)),
        extend_prefix_lens_cpu=[part[1] for part in parts],
        extend_seq_lens_cpu=[part[2] for part in parts],
        seq_lens=Rows([part[1] + part[2] for part in parts]),
    )


def decode(*parts: tuple[str, int]) -> Any:
    """A forward of (id, sequence length)."""
    return SimpleNamespace(
        forward_mode=Mode(name="DECODE"),
        rids=[part[0] for part in parts],
        input_ids=Rows([0] * len(parts)),
        extend_prefix_lens_cpu=None,
        extend_seq_lens_cpu=None,
        seq_lens=Rows([part[1] for part in parts]),
    )


def phases(batches: list[Any]) -> list[list[str]]:
    reader = CompositionReader(NONCE)
    read = [reader.read(batch) for batch in batches]
    return [[part.phase for part in composition.parts] for composition in read if composition is not None]


@given(
    st.integers(0, 10**9 - 1),
    st.sampled_from(sorted(ARM_LETTERS)),
    st.booleans(),
    st.integers(0, 10**9 - 1),
)
def test_an_id_reads_back_as_it_was_given(number: int, arm: str, armed: bool, request: int) -> None:
    given_id = RequestId(NONCE, number, arm, armed, request)

    assert parse_rid(str(given_id), NONCE) == given_id
    assert parse_rid(str(given_id), "other") is None


@pytest.mark.parametrize(
    "text",
    ["HEALTH_CHECK_1", "klb-a1b2-arm0-3", "klb-a1b2-1g-", "klb-a1b2-1x-0", "klb-a1b2-1g+-0\n", "", None, 7],
)
def test_other_ids_are_foreign(text: object) -> None:
    assert parse_rid(text, NONCE) is None


def test_a_second_chunk_of_a_cold_request_is_no_restore() -> None:
    assert phases([extend((rid(0), 0, 8)), extend((rid(0), 8, 8)), extend((rid(1), 8, 2))]) == [
        ["extend"],
        ["chunk"],
        ["restored"],
    ]


def test_a_retracted_request_is_resumed_and_then_decodes_again() -> None:
    batches = [
        extend((rid(0), 0, 4)),
        decode((rid(0), 5)),
        decode((rid(0), 6)),
        extend((rid(0), 0, 4)),
        extend((rid(0), 4, 2)),
        decode((rid(0), 7)),
    ]

    assert phases(batches) == [["extend"], ["decode"], ["decode"], ["resumed"], ["resumed"], ["decode"]]


def test_a_decode_row_in_a_mixed_batch_is_decode() -> None:
    batches = [
        extend((rid(0), 0, 4)),
        extend((rid(1), 0, 3), (rid(0), 4, 1), mode="MIXED"),
        decode((rid(1), 4), (rid(0), 6)),
    ]

    assert phases(batches) == [["extend"], ["extend", "decode"], ["decode", "decode"]]


def test_a_last_chunk_of_one_row_in_a_mixed_batch_is_a_chunk() -> None:
    batches = [
        extend((rid(0), 0, 3)),
        extend((rid(1), 0, 8)),
        extend((rid(1), 8, 1), (rid(0), 3, 1), mode="MIXED"),
        extend((rid(2), 0, 4), (rid(0), 4, 1), (rid(1), 9, 1), mode="MIXED"),
    ]

    assert phases(batches) == [["extend"], ["extend"], ["chunk", "decode"], ["extend", "decode", "decode"]]


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
@pytest.mark.parametrize("others", [rid(1), "somebody else"])
def test_a_retracted_request_whose_cache_leaves_one_row_is_resumed(mode: str, others: str) -> None:
    """It missed a step of those that went on."""
    batches = [
        extend((rid(0), 0, 4), (others, 0, 4)),
        decode((rid(0), 5), (others, 5)),
        decode((others, 6)),
        extend(("new", 0, 4), (rid(0), 5, 1), (others, 6, 1), mode=mode),
        decode((rid(0), 7), (others, 8)),
    ]

    again, onwards = phases(batches)[-2:]
    assert (again[1], onwards[0]) == ("resumed", "decode")


def test_decoding_requests_that_are_run_as_an_extend_decode() -> None:
    """As a rank does whose peers extend."""
    batches = [extend((rid(0), 0, 4)), decode((rid(0), 5)), extend((rid(0), 5, 1)), decode((rid(0), 7))]

    assert phases(batches) == [["extend"], ["decode"], ["decode"], ["decode"]]


def test_positions_of_decode_rows_are_counted_and_not_read_from_the_device() -> None:
    class Device(Rows):
        def tolist(self) -> list[int]:
            raise AssertionError("a forward waited for the device")

    reader = CompositionReader(NONCE)
    reader.read(extend((rid(0), 0, 5)))
    batch = decode((rid(0), 6))
    batch.seq_lens = Device([6])
    composition = reader.read(batch)

    assert composition is not None
    assert (composition.parts[0].first_position, composition.parts[0].seq_len) == (5, 6)


def test_forwards_without_a_request_of_ours_are_counted_and_nothing_else() -> None:
    reader = CompositionReader(NONCE)

    assert reader.read(decode(("HEALTH_CHECK_1", 3))) is None
    composition = reader.read(extend(("someone else", 0, 4), (rid(2, armed=True), 0, 3)))

    assert composition is not None
    assert composition.number == 2
    assert [part.rid for part in composition.parts] == ["", rid(2, armed=True)]
    assert [(part.row, part.rows) for part in composition.armed] == [(4, 3)]


def logged(path: Path, batches: list[Any]) -> list[Composition]:
    reader, log = CompositionReader(NONCE), CompositionLog(path)
    read = [composition for batch in batches if (composition := reader.read(batch)) is not None]
    for composition in read:
        log.append(composition)
    return read


def test_each_forward_carries_the_faults_that_were_armed_during_it(tmp_path: Path) -> None:
    path = tmp_path / "forwards-0.jsonl"
    reader, log = CompositionReader(NONCE), CompositionLog(path)
    batches = [extend((rid(0), 0, 4)), *(decode((rid(0), length)) for length in (5, 6, 7, 8))]
    armed = [("key-write:step=4",), ("key-write:step=4",), ("key-write:step=4",), (), ()]
    for batch, faults in zip(batches, armed, strict=True):
        composition = reader.read(batch)
        assert composition is not None
        log.append(composition, faults)
    assert [c.faults for c in read_compositions(path, NONCE, [1])] == armed


def test_the_log_reads_back_what_was_written_and_repeats_itself_briefly(tmp_path: Path) -> None:
    path = tmp_path / "forwards-0.jsonl"
    batches = [
        extend((rid(0), 0, 4), ("foreign", 0, 2)),
        decode((rid(0), 5), ("foreign", 3)),
        decode((rid(0), 6), ("foreign", 4)),
        decode((rid(0), 7)),
    ]
    written = logged(path, batches)

    read = read_compositions(path, NONCE, [1])
    assert [c.number for c in read] == [1, 2, 3, 4]
    assert [[(p.first_position, p.rows, p.seq_len, p.phase) for p in c.parts] for c in read] == [
        [(p.first_position, p.rows, p.seq_len, p.phase) for p in c.parts] for c in written
    ]
    assert json.loads(path.read_text().splitlines()[2]) == {
        "n": 3,
        "mode": "decode",
        "rows": 2,
        "again": True,
    }
    assert read_compositions(path, NONCE, [2]) == []


def test_a_line_that_is_not_whole_yet_is_left_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "forwards-0.jsonl"
    logged(path, [extend((rid(0), 0, 4))])
    with path.open("a") as file:
        file.write('{"n": 2, "mo')
    assert len(read_compositions(path, NONCE, [1])) == 1

    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(KlbenchError, match="line 2"):
        read_compositions(path, NONCE, [1])


def test_a_capture_in_other_batches_is_another_experiment(tmp_path: Path) -> None:
    path = tmp_path / "forwards-0.jsonl"
    measured = [
        extend((rid(0), 0, 4), (rid(1), 0, 6)),
        decode((rid(0), 5), (rid(1), 7)),
        decode((rid(0), 6), (rid(1), 8)),
        extend((rid(0, "scoring"), 0, 6), (rid(1, "scoring"), 0, 8)),
    ]

    def again(alone_in_decode: bool) -> list[Any]:
        a, b = rid(0, number=2, armed=True), rid(1, number=2)
        both = [extend((a, 0, 4), (b, 0, 6))]
        both += [decode((a, 5))] if alone_in_decode else [decode((a, 5), (b, 7))]
        return [*both, extend((rid(0, "scoring", 2, True), 0, 6), (rid(1, "scoring", 2), 0, 8))]

    logged(path, [*measured, *again(alone_in_decode=False)])
    forwards = read_compositions(path, NONCE, [1, 2])
    same = compare_compositions(forwards, [1], forwards, [2], 0)
    assert (same.forwards, same.same, same.repeated) == (3, 3, True)

    path.unlink()
    logged(path, [*measured, *again(alone_in_decode=True)])
    forwards = read_compositions(path, NONCE, [1, 2])
    other = compare_compositions(forwards, [1], forwards, [2], 0)
    assert not other.repeated
    assert other.first_difference == (
        "generation arm, position 4: 2 rows in the measured forward, 1 in the captured one"
    )
