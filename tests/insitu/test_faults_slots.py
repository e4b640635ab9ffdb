"""Faults in K/V slots, without a server: which row of the pool, in which forward, and the proof."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import faults, faults_state  # noqa: E402
from klbench.insitu.faults_catalogue import parse_faults  # noqa: E402

LENGTH, WIDTH, WINDOW = 100, 4, 10
RIDS = ["klb-a1b2-1g-0", "klb-a1b2-1g-1"]


class Attention(torch.nn.Module):
    """Stores what it is given, as the server's does; its layer has one key row for each position."""

    layer_id = 1
    sliding_window_size = WINDOW

    def __init__(self, lab: "Lab") -> None:
        super().__init__()
        self._lab = [lab]

    def forward(self, q: Any, k: Any, v: Any, batch: Any) -> Any:  # noqa: ARG002 - as RadixAttention
        (lab,) = self._lab
        lab.seen = lab.keys.clone()
        row = 0
        for index, (first, end) in enumerate(batch.spans):
            lab.keys[lab.slots(index, list(range(first, end)))] = k[row : row + end - first]
            row += end - first
        return q


class Lab:
    """Request i has its position p in slot i * LENGTH + p."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Any) -> None:
        torch.manual_seed(0)
        self.keys = torch.randn(2 * LENGTH, WIDTH)
        self.seen = self.keys
        self.attention = Attention(self)
        patch.setattr(faults_state, "attention_at", lambda _model, _layer: self.attention)
        patch.setattr(faults_state, "kv_buffers", lambda _: (self.keys, self.keys))
        patch.setattr(faults_state, "slots_of", lambda _layer, _batch, index, at: self.slots(index, at))
        self.runner = SimpleNamespace(model=SimpleNamespace(), forward=self._forward)
        context = SimpleNamespace(
            control_dir=folder, nonce="a1b2", rank=0, presence=SimpleNamespace(update=lambda **_: None)
        )
        self.lab = faults.FaultLab(self.runner, context)
        self.lab.wrap_forward()

    def slots(self, index: int, positions: Any) -> Any:
        return torch.tensor(positions) + index * LENGTH

    def _forward(self, batch: Any) -> Any:
        rows = sum(end - first for first, end in batch.spans)
        return self.attention(*(torch.randn(rows, WIDTH) for _ in range(3)), batch)

    def extend(self, *spans: tuple[int, int], rids: "list[str] | None" = None) -> Any:
        """Computes positions [first, end) of each request; returns the slots that were changed before."""
        lengths = [end - first for first, end in spans]
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True),
            rids=(rids or RIDS)[: len(spans)],
            extend_prefix_lens_cpu=[first for first, _ in spans],
            extend_seq_lens_cpu=lengths,
            input_ids=torch.zeros(sum(lengths)),
            spans=spans,
        )
        return self._changed(batch)

    def decode(self, *tokens: int) -> Any:
        """A step behind which request i has tokens[i]; returns the slots that were changed before."""
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False),
            rids=RIDS[: len(tokens)],
            seq_lens=torch.tensor(tokens),
            input_ids=torch.zeros(len(tokens)),
            spans=[(count - 1, count) for count in tokens],
        )
        return self._changed(batch)

    def _changed(self, batch: Any) -> list[int]:
        """The slots that were changed before attention ran."""
        before = self.keys.clone()
        self.runner.forward(batch)
        changed: list[int] = (self.seen != before).any(dim=1).nonzero().flatten().tolist()
        return changed

    def arm(self, text: str) -> None:
        self.lab.arm(parse_faults(text))

    def proof(self) -> dict[str, Any]:
        (proof,) = self.lab.arm(())
        return proof


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Lab:
    return Lab(monkeypatch, tmp_path)


def test_the_key_of_a_later_chunk_is_its_neighbours_and_a_first_chunk_is_whole(lab: Lab) -> None:
    lab.arm("chunk-key:back=2")
    assert lab.extend((0, 8)) == []
    neighbour = lab.keys[5].clone()
    assert lab.extend((8, 12)) == [6]
    assert torch.equal(lab.seen[6], neighbour)
    assert lab.decode(13) == []
    # A restored prefix is no chunk.
    assert lab.extend((8, 12), rids=["klb-a1b2-2g-0"]) == []
    proof = lab.proof()
    assert (proof["count"], proof["first"]["positions"]) == (1, [6])


def test_a_slot_is_given_to_the_next_request_of_the_batch_at_one_step(lab: Lab) -> None:
    lab.arm("slot-reuse:step=2,back=3")
    lab.extend((0, 8), (0, 10))
    assert lab.decode(9, 11) == []
    keys = lab.keys.clone()
    # The prompts have 8 and 10 tokens: three rows before their ends are positions 5 and 7.
    assert lab.decode(10, 12) == [5, LENGTH + 7]
    assert torch.equal(lab.seen[5], keys[LENGTH + 10])
    assert lab.decode(11, 13) == []
    proof = lab.proof()
    assert (proof["count"], proof["first"]["rid"]) == (2, RIDS[0])


def test_alone_nobody_can_be_given_a_slot(lab: Lab) -> None:
    lab.arm("slot-reuse:step=1,back=3")
    lab.extend((0, 8))
    assert lab.decode(9) == []
    assert lab.proof()["count"] == 0


def test_decode_loses_a_row_inside_its_window_once_it_is_past_it(lab: Lab) -> None:
    lab.arm("window-evict:inside=3")
    lab.extend((0, 10))
    assert lab.decode(11) == [], "position 10 still sees all"
    assert lab.decode(12) == [11 - WINDOW + 3]
    assert (lab.seen[4] == 0).all()
    assert lab.extend((0, 40), rids=["klb-a1b2-3s-0"]) == []
    assert lab.proof()["first"]["positions"] == [4]


def test_without_a_window_nothing_can_leave_it(lab: Lab) -> None:
    lab.attention.sliding_window_size = -1
    with pytest.raises(ValueError, match="has no window"):
        lab.arm("window-evict")


def test_after_a_retraction_one_key_is_what_its_slot_held_before(lab: Lab) -> None:
    lab.arm("stale-retraction:back=2")
    lab.extend((0, 8))
    lab.decode(9)
    lab.decode(10)
    before = lab.keys.clone()
    lab.extend((0, 10))
    assert torch.equal(lab.keys[7], before[7])
    assert not torch.equal(lab.keys[6], before[6])
    assert not torch.equal(lab.keys[8], before[8])
    proof = lab.proof()
    assert (proof["count"], proof["first"]["positions"]) == (1, [7])


def test_a_retracted_request_that_gets_its_own_slots_back_is_not_spoilt(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.arm("stale-retraction:back=2")
    monkeypatch.setattr(torch, "randn", torch.ones)
    lab.extend((0, 8))
    lab.decode(9)
    lab.extend((0, 9))
    assert lab.proof()["count"] == 0
