"""Slots that went to requests that are not recorded: noted at every forward of an open capture."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import unseen_writes  # noqa: E402
from klbench.insitu.composition import CompositionReader  # noqa: E402
from klbench.insitu.unseen_writes import UnseenWrites  # noqa: E402
from tests.insitu.test_capture_switch import Rank  # noqa: E402
from tests.insitu.test_digest_capture import ARMED, NONCE, OTHER, Bench, decode, extend  # noqa: E402


class Runner:
    """Forwards whose rows get the slots that are given."""

    def __init__(self, pool: Any = None) -> None:
        self.reader = CompositionReader(NONCE)
        self.unseen = UnseenWrites(SimpleNamespace(token_to_kv_pool=pool))

    def forward(self, batch: Any, slots: list[int]) -> None:
        batch.out_cache_loc = torch.tensor(slots, dtype=torch.int32)
        composition = self.reader.read(batch)
        self.unseen.note(self.reader.number, composition, batch)
        # It is the server's, which may use it again.
        batch.out_cache_loc.zero_()

    @property
    def table(self) -> list[list[int]]:
        return self.unseen.table().tolist()


def test_the_slots_of_rows_that_are_not_armed_are_noted_whoever_shares_the_forward() -> None:
    runner = Runner()
    runner.forward(extend((ARMED, 0, [7, 3])), [20, 21])
    runner.forward(
        extend((OTHER, 0, [1]), (ARMED.replace("1g", "2g"), 0, [7, 3]), ("x", 0, [5])), [30, 31, 32, 33]
    )
    runner.forward(extend((OTHER, 1, [1, 2])), [40, 41])
    runner.forward(decode(("somebody else", 4, 1)), [50])

    assert runner.table == [[2, 30, 0], [2, 33, 0], [3, 40, 0], [3, 41, 0], [4, 50, 0]]


def test_a_windowed_pool_has_slots_of_its_own() -> None:
    pool = SimpleNamespace(layers_mapping={}, translate_loc_from_full_to_swa=lambda slots: slots + 100)
    runner = Runner(pool)
    runner.forward(extend((OTHER, 0, [1, 2])), [4, 5])

    assert runner.table == [[1, 4, 0], [1, 5, 0], [1, 104, 1], [1, 105, 1]]


def test_forwards_that_write_nothing_are_passed_over() -> None:
    runner = Runner()
    runner.unseen.note(1, None, SimpleNamespace(rids=None))
    runner.unseen.note(2, None, SimpleNamespace(rids=None, out_cache_loc=None))
    runner.forward(extend((OTHER, 0, [])), [])

    assert runner.table == []


@pytest.mark.parametrize("reason", ["too many", "a pool that is not known"])
def test_what_cannot_be_noted_may_have_been_any_slot(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    pool = None
    if reason == "too many":
        monkeypatch.setattr(unseen_writes, "_MOST_SLOTS", 2)
    else:
        pool = SimpleNamespace(layers_mapping={})
    runner = Runner(pool)
    runner.forward(extend((OTHER, 0, [1, 2, 3])), [4, 5, 6])
    runner.forward(extend((OTHER, 3, [1, 2, 3])), [7, 8, 9])

    assert runner.table == [[1, 4, 0], [1, 5, 0], [1, 6, 0], [1, -1, 0]]


def test_a_trace_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch)
    bench.forward(extend((ARMED, 0, [7, 3])))
    bench.capture.unseen.note(5, None, SimpleNamespace(out_cache_loc=torch.tensor([8, 9])))

    trace = bench.close()

    assert (trace.unseen_number.tolist(), trace.unseen_pool.tolist()) == ([5, 5], [8, 9])
    assert (trace.unseen_rank.tolist(), trace.unseen_windowed.tolist()) == ([0, 0], [0, 0])


def test_a_trace_without_any_reads_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch)
    bench.forward(extend((ARMED, 0, [7, 3])))

    assert len(bench.close().unseen_pool) == 0


@pytest.mark.parametrize("backend", ["digest", "state", "dumper"])
def test_forwards_without_a_request_of_ours_are_noted_while_a_capture_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    rank = Rank(tmp_path, backend, monkeypatch)
    batch = extend(("somebody else", 0, [1, 2]))
    batch.out_cache_loc = torch.tensor([6, 7])
    rank.runner.forward(batch)

    digests = rank.capture._digests
    found = [] if digests is None else digests.unseen.table().tolist()
    assert found == ([] if backend == "dumper" else [[1, 6, 0], [1, 7, 0]])
    assert rank.troubles == []
