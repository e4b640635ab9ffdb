"""One forward's recording: which tensors have rows, and what runs on which stream."""

from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import recording as recording_module  # noqa: E402
from klbench.insitu.composition import Composition, Part  # noqa: E402
from klbench.insitu.digest import as_lanes, row_sums  # noqa: E402
from klbench.insitu.recording import ROWS, WHOLE, ArmedRows, Axes, Names, Recording  # noqa: E402
from klbench.insitu.rids import parse_rid  # noqa: E402

NONCE = "n"


def forward(rows_of_each: Iterable[int], axes: Axes, arm: str = "g") -> Recording:
    """A forward whose requests have so many rows, all of them armed."""
    parts, row = [], 0
    for index, rows in enumerate(rows_of_each):
        rid = f"klb-{NONCE}-1{arm}+-{index}"
        parts.append(Part(rid, 0, rows, 0, rows, "extend", row, parse_rid(rid, NONCE)))
        row += rows
    composition = Composition(1, "extend", row, parts)
    recording = Recording(
        composition, ArmedRows.of(composition, row), torch.device("cpu"), Names(), False, axes
    )
    recording.next_event()
    return recording


def added(tensor: Any, rows_of_each: Iterable[int], axes: Axes) -> tuple[int, int, Any]:
    """Group, bytes of a row and sums of a tensor given to operator 0."""
    recording = forward(rows_of_each, axes)
    recording.add(0, 0, 0, tensor)
    taken = recording.take()
    return taken.entries[0][6], taken.entries[0][4], taken.arrived()[0]


def test_a_weight_is_whole_in_forwards_of_any_size() -> None:
    """The sinks of an attention are 64; 32 requests that decode are not two of them each."""
    sinks = torch.nn.Parameter(torch.randn(64).bfloat16())
    axes: Axes = {}

    decoded = added(sinks, [1] * 32, axes)
    prefilled = added(sinks, [300] * 32, axes)

    assert decoded[:2] == prefilled[:2] == (WHOLE, 128)
    assert torch.equal(decoded[2], prefilled[2])


def test_a_tensor_that_a_prefill_shows_to_have_no_rows_has_none_in_a_decode() -> None:
    sinks = torch.randn(64).bfloat16()
    axes: Axes = {}

    prefilled = added(sinks, [300] * 32, axes)
    decoded = added(sinks, [1] * 32, axes)

    assert decoded[:2] == prefilled[:2] == (WHOLE, 128)
    assert added(torch.randn(64), [1] * 32, {})[0] == ROWS


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        # Rows stand in several dimensions: it may be either.
        ((1, 4, 4, 16), 4),
        # A call that got nothing.
        ((0, 16), 4),
    ],
)
def test_a_shape_that_shows_nothing_is_not_remembered(shape: tuple[int, ...], rows: int) -> None:
    axes: Axes = {}

    assert added(torch.randn(shape), [1] * rows, axes)[0] == WHOLE
    assert axes == {}


def test_positions_of_several_kinds_are_rows_behind_them_also_in_a_forward_of_as_many_rows() -> None:
    """Models of images have [3, rows] positions: three rows are three columns there."""
    axes: Axes = {}
    added(torch.arange(15).reshape(3, 5), [5], axes)
    positions = torch.arange(9).reshape(3, 3)

    group, row_bytes, sums = added(positions, [1, 1, 1], axes)

    assert (group, row_bytes) == (ROWS, 24)
    assert torch.equal(sums, row_sums(positions.t().contiguous()))


class Stream:
    """A stream that notes for which others it has waited. `running` is the one that runs now."""

    running: "Stream"

    def __init__(self, name: str) -> None:
        self.name = name
        self.behind: set[Stream] = {self}

    def wait_stream(self, other: "Stream") -> None:
        self.behind |= other.behind


class Streams:
    """Two streams, and on which one each tensor was made: using it on one that has not waited fails.

    For rows that are no whole 64-bit lanes: those pass through `as_lanes`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.other = Stream("main"), Stream("other")
        Stream.running = self.main
        self.made: dict[int, Stream] = {}
        self.tensors: list[Any] = []
        self.kept: set[tuple[str, int]] = set()
        self.digests: list[tuple[str, int]] = []
        monkeypatch.setattr(recording_module, "current_stream", lambda _: Stream.running)
        monkeypatch.setattr(recording_module, "keep_for", self._keep)
        for name in ("as_lanes", "row_sums", "sums_of_pieces"):
            monkeypatch.setattr(recording_module, name, self._watched(name, getattr(recording_module, name)))

    def _keep(self, stream: Stream, tensors: Iterable[Any]) -> None:
        self.kept |= {(stream.name, id(tensor)) for tensor in tensors}

    def _watched(self, name: str, original: Any) -> Any:
        def watched(given: Any, *more: Any) -> Any:
            result = original(given, *more)
            if name != "as_lanes":
                pieces = given if isinstance(given, list) else [given]
                self.digests.append((Stream.running.name, len(pieces)))
                for piece in pieces:
                    self.used(piece)
            made = result[0] if name == "as_lanes" else result
            self.made[id(made)] = Stream.running
            self.tensors.append(made)
            return result

        return watched

    def used(self, tensor: Any) -> None:
        maker = self.made[id(tensor)]
        assert maker in Stream.running.behind, f"{Stream.running.name} has not waited for {maker.name}"
        if maker is not Stream.running:
            assert (Stream.running.name, id(tensor)) in self.kept


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_what_is_copied_on_one_stream_is_digested_there_or_behind_a_wait(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts run beside a shared expert: what waits of one must not be digested on the other's stream."""
    monkeypatch.setattr(recording_module, "_PENDING_LANES", 8)
    recording = forward([3], {})
    values = {}
    for number in range(24):
        Stream.running = streams.other if number % 3 == 1 else streams.main
        values[number] = torch.arange(9, dtype=torch.int16).reshape(3, 3) + number
        recording.add(number, 0, 0, values[number])
    Stream.running = streams.other
    values[24] = torch.arange(1 << 15, dtype=torch.int16).repeat(3, 1)
    recording.add(24, 0, 0, values[24])
    Stream.running = streams.main
    taken = recording.take()

    assert {name for name, _ in streams.digests} == {"main", "other"}
    assert streams.other in streams.main.behind
    sums, _ = taken.arrived()
    assert sorted(taken.order) == list(range(25))
    for place, number in enumerate(taken.order):
        assert torch.equal(sums[:, 3 * place : 3 * place + 3], row_sums(as_lanes(values[number], 3)[0]))


def test_what_others_send_along_is_waited_for(streams: Streams) -> None:
    recording = forward([3], {})
    Stream.running = streams.other
    recording.add(0, 0, 0, torch.arange(3, dtype=torch.int16))
    sent = torch.arange(4)
    recording.extras.append(("what", sent))
    Stream.running = streams.main

    recording.take()

    assert streams.other in streams.main.behind
    assert ("main", id(sent)) in streams.kept


def test_a_single_stream_waits_for_nothing(streams: Streams) -> None:
    recording = forward([3], {})
    recording.add(0, 0, 0, torch.arange(3, dtype=torch.int16))

    recording.take()

    assert streams.kept == set()
    assert streams.digests == [("main", 1)]
