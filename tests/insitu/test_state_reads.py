"""State as it is read: K/V rows through the page table, windows, rewritten slots, recurrent slots."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from klbench.core import digests as reference  # noqa: E402
from klbench.core.trace import Slot, Trace  # noqa: E402
from klbench.engine.traces import read_trace  # noqa: E402
from klbench.insitu import state_reads  # noqa: E402
from klbench.insitu.composition import Composition, CompositionReader  # noqa: E402
from klbench.insitu.recording import ArmedRows, Names, Recording  # noqa: E402
from klbench.insitu.recording_writer import Limits, NewNames, RecordingWriter, Tokens  # noqa: E402
from klbench.insitu.state_reads import Pools, StateReads  # noqa: E402
from klbench.insitu.trace_writer import TraceWriter  # noqa: E402
from tests.insitu.test_digest_capture import Bench, decode, extend  # noqa: E402

NONCE = "a1b2"
HEADS, WIDTH = 2, 8
POOL = 64


def rid(request: int, arm: str = "g") -> str:
    return f"klb-{NONCE}-1{arm}+-{request}"


class Pool:
    """A server's pools with one attention layer, its requests at scattered slots, and a trace of its looks.

    Each forward writes its rows' K and V first, as attention does, and looks afterwards.
    """

    def __init__(self, folder: Path, window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.window = window
        self.folder = folder
        self.keys = torch.randn((POOL, HEADS, WIDTH), generator=generator).bfloat16()
        self.values = torch.randn((POOL, HEADS, WIDTH), generator=generator).bfloat16()
        self.req_to_token = torch.randperm(POOL, generator=generator).reshape(2, POOL // 2).int()
        self.translate: Any = None
        self.reader = CompositionReader(NONCE)
        self.troubles: list[BaseException] = []
        self.names = {"argument": Names(), "dtype": Names()}
        self.writer = RecordingWriter(
            TraceWriter(folder, 0, NONCE, "digest"), Limits(folder, 0, 1 << 30), self.troubles.append
        )
        self.operators: tuple[Any, ...] = (("attn", 0, "RadixAttention", "kv", window),)

    def forward(self, batch: Any, pool_rows: list[int], change: Any = None) -> Composition:
        composition = self.reader.read(batch)
        assert composition is not None
        batch.req_pool_indices = torch.tensor(pool_rows)
        recording = Recording(
            composition,
            ArmedRows.of(composition, len(batch.input_ids)),
            torch.device("cpu"),
            self.names["dtype"],
            versions_tell=True,
        )
        for index, part in enumerate(composition.parts):
            for position in range(part.first_position, part.seq_len):
                slot = self.slot(pool_rows[index], position)
                self.keys[slot] = self.row(position, 0)
                self.values[slot] = self.row(position, 1)
        if change is not None:
            change()
        looks = StateReads(recording, batch, 1, self.names["argument"].number)
        recording.next_event()
        buffers = (("k", self.keys), ("v", self.values))
        looks.look(0, self.window, self.req_to_token, buffers, self.translate)
        looks.finish()
        self.hand_over(recording, batch)
        return composition

    def hand_over(self, recording: Recording, batch: Any) -> None:
        rows = torch.tensor(recording.rows.in_batch)
        recording.extras.append((Tokens(), torch.stack([batch.input_ids[rows], batch.positions[rows]])))
        names = NewNames(
            self.operators,
            tuple(self.names["argument"].take_new()),
            tuple(self.names["dtype"].take_new()),
        )
        self.operators = ()
        self.writer.put(names, recording.take(), sampled=False)

    def slot(self, pool_row: int, position: int) -> int:
        found = self.req_to_token[pool_row, position].long()
        return int(found if self.translate is None else self.translate(found))

    @staticmethod
    def row(position: int, which: int) -> Any:
        return torch.full((HEADS, WIDTH), 3.0 * position + which).bfloat16()

    def close(self) -> Trace:
        self.writer.close(True, False, None, [])
        trace = read_trace(self.folder)
        assert self.troubles == []
        assert trace.invalid is None
        return trace


def digest(row: Any) -> tuple[int, ...]:
    return tuple(reference.digest_rows(row.contiguous().view(torch.uint8).numpy().reshape(1, -1))[0].tolist())


def slots(trace: Trace, kind: Slot, argument: str = "k", forward: int | None = None) -> dict[int, Any]:
    """{position: (pool slot, digest)} of one argument."""
    mine = (trace.slot_kind == kind) & (trace.slot_argument == trace.arguments.index(argument))
    if forward is not None:
        mine &= trace.slot_forward == forward
    return {
        int(trace.slot_position[i]): (int(trace.slot_pool[i]), tuple(trace.slot_digest[i].tolist()))
        for i in np.flatnonzero(mine)
    }


def reads(trace: Trace, argument: str = "k") -> dict[tuple[int, int, int], Any]:
    """{(forward, low, high): digest} of one argument."""
    mine = np.flatnonzero(trace.read_argument == trace.arguments.index(argument))
    return {
        (
            int(trace.row_forward[trace.read_row[i]]),
            int(trace.read_low[i]),
            int(trace.read_high[i]),
        ): tuple(trace.read_digest[i].tolist())
        for i in mine
    }


def test_rows_written_are_read_with_their_pool_slots_and_the_bits_that_are_there(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.forward(extend((rid(0), 0, [1, 2, 3])), [1])

    trace = pool.close()

    for which, argument in enumerate(("k", "v")):
        expected = {p: (pool.slot(1, p), digest(pool.row(p, which))) for p in range(3)}
        assert slots(trace, Slot.WRITTEN, argument) == expected
        assert slots(trace, Slot.READ, argument) == expected


def test_a_read_does_not_depend_on_the_forwards_that_led_to_it(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "once").mkdir()
    stepwise, at_once = Pool(tmp_path / "steps"), Pool(tmp_path / "once")
    stepwise.forward(extend((rid(0), 0, [1, 2])), [0])
    stepwise.forward(extend((rid(0), 2, [3, 4])), [0])
    stepwise.forward(decode((rid(0), 4, 5)), [0])
    at_once.forward(extend((rid(0, "s"), 0, [1, 2, 3, 4, 5])), [1])

    steps, once = stepwise.close(), at_once.close()

    for argument in ("k", "v"):
        by_range = {(low, high): digest for (_, low, high), digest in reads(steps, argument).items()}
        assert by_range == {(low, high): digest for (_, low, high), digest in reads(once, argument).items()}
        assert sorted(by_range) == [(0, length) for length in range(1, 6)]
        assert len(set(by_range.values())) == 5


def test_reads_of_several_requests_in_one_decode_step_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "alone").mkdir()
    both, alone = Pool(tmp_path / "both"), Pool(tmp_path / "alone")
    both.forward(extend((rid(0), 0, [1, 2, 3]), (rid(1), 0, [1, 2])), [0, 1])
    both.forward(decode((rid(0), 3, 9), (rid(1), 2, 9)), [0, 1])
    alone.forward(extend((rid(1), 0, [1, 2])), [1])
    alone.forward(decode((rid(1), 2, 9)), [1])

    together, single = both.close(), alone.close()

    of_request = together.row_request[together.read_row] == 1
    assert np.array_equal(together.read_digest[of_request], single.read_digest)
    assert np.array_equal(together.read_high[of_request], single.read_high)


def test_a_restored_prefix_is_read_whole_and_only_the_rows_behind_it_are_written(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.forward(extend((rid(0, "w"), 0, [1, 2, 3, 4])), [0])
    pool.forward(extend((rid(0), 4, [5])), [0])

    trace = pool.close()

    assert set(slots(trace, Slot.READ, forward=1)) == {0, 1, 2, 3, 4}
    assert set(slots(trace, Slot.WRITTEN, forward=1)) == {4}
    assert slots(trace, Slot.READ, forward=1)[2] == slots(trace, Slot.WRITTEN, forward=0)[2]


def test_a_slot_that_somebody_overwrites_is_read_again_and_changes_the_read(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.forward(extend((rid(0), 0, [1, 2, 3])), [0])

    def overwrite() -> None:
        pool.keys[pool.slot(0, 1)] = pool.keys[pool.slot(0, 0)]

    pool.forward(decode((rid(0), 3, 4)), [0], overwrite)
    pool.forward(decode((rid(0), 4, 4)), [0])

    trace = pool.close()

    assert set(slots(trace, Slot.READ, forward=1)) == {1, 3}
    assert slots(trace, Slot.READ, forward=1)[1] == (pool.slot(0, 1), digest(pool.row(0, 0)))
    assert set(slots(trace, Slot.READ, "v", forward=1)) == {3}
    assert set(slots(trace, Slot.READ, forward=2)) == {4}


def test_swapped_rows_change_the_read(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "swapped").mkdir()
    good, swapped = Pool(tmp_path / "good"), Pool(tmp_path / "swapped")

    def swap() -> None:
        first, second = swapped.slot(0, 0), swapped.slot(0, 1)
        swapped.keys[[first, second]] = swapped.keys[[second, first]]

    good.forward(extend((rid(0), 0, [1, 2, 3])), [0])
    swapped.forward(extend((rid(0), 0, [1, 2, 3])), [0], swap)
    ours, theirs = good.close(), swapped.close()

    assert reads(ours)[0, 0, 3] != reads(theirs)[0, 0, 3]
    assert reads(ours, "v") == reads(theirs, "v")


def test_a_window_reads_only_what_it_reaches_in_the_slots_of_its_own_pool(tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    (tmp_path / "cut").mkdir()
    pool = Pool(tmp_path / "long", window=2)
    pool.translate = lambda locations: (locations + 7) % POOL
    pool.forward(extend((rid(0), 0, [1, 2, 3, 4])), [0])

    def evict() -> None:
        # What lies behind the window belongs to somebody else by now.
        pool.keys[pool.slot(0, 0)] = -1

    pool.forward(decode((rid(0), 4, 5)), [0], evict)
    trace = pool.close()
    same = Pool(tmp_path / "cut", window=2)
    same.forward(extend((rid(0), 0, [1, 2, 3, 4, 5])), [1])
    other = same.close()

    assert set(reads(trace)) == {(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 4), (1, 2, 5)}
    assert reads(trace)[1, 2, 5] == reads(other)[0, 2, 5]
    assert slots(trace, Slot.READ, forward=1) == {4: (pool.slot(0, 4), digest(pool.row(4, 0)))}


def test_beyond_the_limit_a_decode_step_sends_its_own_rows_only_and_still_reads_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_reads, "_FULL_LOOK_BYTES", 0)
    pool = Pool(tmp_path)
    pool.forward(extend((rid(0), 0, [1, 2, 3]), (rid(1), 0, [1])), [0, 1])

    def overwrite() -> None:
        pool.keys[pool.slot(0, 1)] = 0

    pool.forward(decode((rid(0), 3, 4), (rid(1), 1, 4)), [0, 1], overwrite)
    trace = pool.close()

    mine = trace.slot_forward == 1
    assert set(zip(trace.slot_request[mine].tolist(), trace.slot_position[mine].tolist(), strict=True)) == {
        (0, 3),
        (1, 1),
    }
    assert set(trace.slot_pool[mine].tolist()) == {pool.slot(0, 3), pool.slot(1, 1)}
    assert len(trace.read_row) == 2 * (3 + 1 + 2)


def test_recurrent_slots_are_read_before_and_written_after_a_call(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    state = torch.randn((5, 3, 4)).bfloat16()
    before = state[3].clone()

    def forward(batch: Any, change: Any) -> None:
        composition = pool.reader.read(batch)
        assert composition is not None
        rows = ArmedRows.of(composition, len(batch.input_ids))
        recording = Recording(composition, rows, torch.device("cpu"), pool.names["dtype"], True)
        looks = StateReads(recording, batch, 1, pool.names["argument"].number)
        recording.next_event()
        looks.look_at_slots(0, "conv", state, torch.tensor([3]), written=False)
        change()
        looks.look_at_slots(0, "conv", state, torch.tensor([3]), written=True)
        pool.hand_over(recording, batch)

    forward(extend((rid(0), 0, [1, 2])), lambda: state[3].copy_(before + 1))
    written_first = state[3].clone()
    forward(decode((rid(0), 2, 4)), lambda: state[3].mul_(2))
    trace = pool.close()

    # A first forward without a prefix reads no state: its slot holds what its last owner left.
    assert slots(trace, Slot.READ, "conv") == {1: (3, digest(written_first))}
    assert slots(trace, Slot.WRITTEN, "conv") == {1: (3, digest(written_first)), 2: (3, digest(state[3]))}
    assert reads(trace, "conv") == {(1, 0, 2): digest(written_first)}


class Slots:
    """A request pool with recurrent slots: request r has slot r + 1."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_mamba_indices(self, requests: Any) -> Any:
        return requests + 1

    def mamba2_layer_cache(self, layer: int) -> Any:
        assert layer == 7
        return SimpleNamespace(conv=[self.state], temporal=None)


def test_a_checkpoint_is_read_where_it_is_until_its_copy_is_made(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    state = torch.randn((5, 3, 4)).bfloat16()

    def look(batch: Any, written: bool) -> None:
        batch.req_pool_indices = torch.tensor([0])
        composition = pool.reader.read(batch)
        assert composition is not None
        rows = ArmedRows.of(composition, len(batch.input_ids))
        recording = Recording(composition, rows, torch.device("cpu"), pool.names["dtype"], True)
        pools = Pools(Slots(state), None)
        recording.next_event()
        reads = StateReads(recording, batch, 1, pool.names["argument"].number, pools)
        reads.recurrent(0, 7, written)
        pool.hand_over(recording, batch)

    first = extend((rid(0), 2, [1, 2]))
    first.mamba_cow_src_indices, first.mamba_cow_dst_indices = torch.tensor([4]), torch.tensor([1])
    look(first, written=False)
    look(decode((rid(0), 4, 4)), written=False)
    trace = pool.close()

    read = trace.slot_kind == Slot.READ
    assert trace.slot_pool[read].tolist() == [4, 1]
    assert trace.slot_position[read].tolist() == [1, 3]


def test_the_sampled_logprob_of_a_chunk_that_does_not_end_its_prompt_is_left_out(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    operators = Names()

    def sample(composition: Composition) -> None:
        count = sum(part.rows for part in composition.parts)
        recording = Recording(
            composition, ArmedRows.of(composition, count), torch.device("cpu"), pool.names["dtype"], True
        )
        recording.next_event()
        last = [part.row + part.rows - 1 for part in composition.parts]
        values = torch.tensor([-float(composition.number)] * len(last))
        number = operators.number("logprob") + 1
        argument = pool.names["argument"].number("0")
        recording.add_rows(number, 1, argument, values, *recording.group_of(last))
        new = [("logprob", 0, "LogitsProcessor", None, None)] if operators.take_new() else []
        names = NewNames(
            tuple(new), tuple(pool.names["argument"].take_new()), tuple(pool.names["dtype"].take_new())
        )
        pool.writer.put(names, recording.take(), sampled=True)

    sample(pool.forward(extend((rid(0), 0, [1, 2])), [0]))
    sample(pool.forward(extend((rid(0), 2, [3, 4])), [0]))
    sample(pool.forward(decode((rid(0), 4, 5)), [0]))
    sample(pool.forward(extend((rid(1), 0, [1, 2])), [1]))
    trace = pool.close()

    logprob = [o.module for o in trace.operators].index("logprob")
    mine = np.flatnonzero(trace.tensor_operator == logprob)
    rows = [trace.tensor_row[trace.tensor_start[i]] for i in mine]
    assert {(int(trace.row_request[row]), int(trace.row_position[row])) for row in rows} == {
        (0, 3),
        (0, 4),
        (1, 1),
    }


def test_requests_that_are_not_armed_are_not_looked_at(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.forward(extend((rid(0), 0, [1]), ("somebody else", 0, [1, 2])), [0, 1])

    trace = pool.close()

    assert set(trace.slot_request.tolist()) == {0}
    assert trace.row_in_batch.tolist() == [0]
    assert set(reads(trace)) == {(0, 0, 1)}


def test_a_look_that_fails_takes_along_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are sent once for all layers: with the look that sent them they are to be sent again."""
    bench = Bench(tmp_path, monkeypatch)
    keys = torch.randn((POOL, WIDTH)).bfloat16()
    table = torch.arange(POOL).reshape(2, POOL // 2)

    def look(self: StateReads, operator: int, module: Any, window: int | None) -> None:
        self.look(operator, window, table, (("k", keys),), None)
        if module is bench.model.layers[0].proj:
            raise RuntimeError("not of this version")

    monkeypatch.setattr(StateReads, "attention", look)
    monkeypatch.setattr(StateReads, "metadata", lambda *_: None)
    for layer in (0, 1):
        bench.capture._modules[f"layers.{layer}.proj"]["state"] = "kv"
    batch = extend((rid(0), 0, [1, 2, 3]))
    batch.req_pool_indices = torch.tensor([1])
    bench.forward(batch)
    trace = bench.close()

    assert (bench.troubles, trace.invalid) == ([], None)
    assert not trace.observes_state
    assert {trace.operators[number].module for number in trace.slot_operator} == {"layers.1.proj"}
    assert slots(trace, Slot.WRITTEN) == {p: (32 + p, digest(keys[32 + p])) for p in range(3)}


def test_a_look_that_fails_while_others_are_digested_loses_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(tmp_path)
    composition = pool.reader.read(batch := extend((rid(0), 0, [1, 2, 3])))
    assert composition is not None
    batch.req_pool_indices = torch.tensor([1])
    recording = Recording(
        composition, ArmedRows.of(composition, 3), torch.device("cpu"), pool.names["dtype"], True
    )
    looks = StateReads(recording, batch, 2, pool.names["argument"].number)
    recording.next_event()
    looks.look(0, None, pool.req_to_token, (("k", pool.keys),), None)
    before = looks.mark()
    with monkeypatch.context() as patched:
        patched.setattr(state_reads, "_PENDING_LANES", 0)
        patched.setattr(state_reads, "_summed", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            looks.look(1, None, pool.req_to_token, (("k", pool.keys),), None)
    looks.undo(before)
    looks.finish()
    pool.hand_over(recording, batch)

    trace = pool.close()

    assert set(trace.slot_operator.tolist()) == {0}
    assert sorted(slots(trace, Slot.WRITTEN)) == [0, 1, 2]
