"""Faults in a convolution's state, without a server: which forward, what they put there, the proof."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from little_convolutions import CHANNELS, LittleRunner, decode, extend  # noqa: E402

from klbench.insitu import faults  # noqa: E402
from klbench.insitu.faults_catalogue import parse_faults  # noqa: E402

A, B = "klb-a1b2-1g-0", "klb-a1b2-1g-1"
WARM = "klb-a1b2-1w-0"


class _Presence:
    def update(self, **_: Any) -> None: ...


class Lab:
    """Two requests in slots 3 and 5 of a little model."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Any) -> None:
        self.runner = LittleRunner(patch, slots=[3, 5])
        context = SimpleNamespace(control_dir=folder, nonce="a1b2", rank=0, presence=_Presence())
        self.lab = faults.FaultLab(self.runner, context)
        self.lab.wrap_forward()
        torch.manual_seed(1)
        self.x = [torch.randn(12, CHANNELS).bfloat16() for _ in range(2)]

    @property
    def states(self) -> Any:
        return self.runner.req_to_token_pool.states

    def arm(self, text: str) -> None:
        self.lab.arm(parse_faults(text))

    def proof(self) -> dict[str, Any]:
        (proof,) = self.lab.arm(())
        return proof

    def cold(self, rid: str, tokens: int, request: int = 0) -> Any:
        return self.runner.forward(extend([rid], [0], [self.x[request][:tokens]], [request]))

    def restored(self, rids: list[str], prefix: int, tokens: int = 2) -> Any:
        """The requests begin behind a prefix whose states lie in their slots already."""
        rows = [self.x[request][prefix : prefix + tokens] for request in range(len(rids))]
        return self.runner.forward(extend(rids, [prefix] * len(rids), rows, list(range(len(rids)))))

    def step(self, rids: list[str], tokens: int) -> Any:
        rows = torch.stack([self.x[request][tokens - 1] for request in range(len(rids))])
        return self.runner.forward(decode(rids, [tokens] * len(rids), rows, list(range(len(rids)))))

    def fill(self) -> None:
        """Both slots hold the states of the first six inputs, as each layer was given them."""
        self.states.zero_()
        self.cold(WARM, 6)
        self.cold("klb-a1b2-1w-1", 6, request=1)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Lab:
    return Lab(monkeypatch, tmp_path)


@pytest.mark.parametrize("fault", ["conv-zeroed", "conv-other", "conv-depth:back=1", "conv-depth:back=3"])
def test_a_restored_request_reads_what_the_fault_says_and_a_cold_one_does_not(lab: Lab, fault: str) -> None:
    name, _, more = fault.partition(":")
    lab.arm(f"{name}:layer=0,{more}")
    lab.fill()
    before = lab.states[0].clone()
    seen: list[Any] = []
    convolution = lab.runner.model.layers[0].conv.conv1d
    handle = convolution.register_forward_pre_hook(lambda *_: seen.append(lab.states[0].clone()))
    lab.restored([A, B], 6)
    handle.remove()
    # A hook that looks before the convolution runs sees the wrong state already.
    expected = {
        "conv-zeroed": torch.zeros_like(before[3]),
        "conv-other": before[5],
        "conv-depth:back=1": lab.x[0][3:5].t(),
        "conv-depth:back=3": lab.x[0][1:3].t(),
    }
    assert torch.equal(seen[0][3], expected[fault])
    assert not torch.equal(seen[0][3], before[3])
    assert torch.equal(lab.states[0][3], lab.x[0][6:8].t()), "its own inputs are behind it as ever"
    proof = lab.proof()
    assert proof["count"] == 2
    assert proof["first"]["rid"] == A
    assert proof["first"]["positions"] == [4, 5]


def test_a_rounded_state_is_near_and_has_few_bits(lab: Lab) -> None:
    lab.arm("conv-rounded:layer=0,bits=2")
    lab.fill()
    before = lab.states[0, 3].clone()
    seen: list[Any] = []
    lab.runner.model.layers[0].conv.conv1d.register_forward_pre_hook(
        lambda *_: seen.append(lab.states[0, 3].clone())
    )
    lab.restored([A], 6)
    assert not torch.equal(seen[0], before)
    assert float(((seen[0] - before).abs() / before.abs()).max()) <= 0.125
    assert (seen[0].view(torch.int16) & 0b11111 == 0).all()


def test_alone_a_request_cannot_be_given_anothers_state_and_nothing_fired(lab: Lab) -> None:
    for fault in ("conv-other", "conv-slot-reuse:layer=0,step=1"):
        lab.arm(fault)
        lab.fill()
        before = lab.states.clone()
        lab.restored([A], 6)
        lab.step([A], 9)
        assert lab.proof()["count"] == 0
        assert torch.equal(lab.states[:, 5], before[:, 5])


def test_a_slot_that_is_given_away_holds_the_neighbours_state_at_that_step_only(lab: Lab) -> None:
    lab.arm("conv-slot-reuse:layer=1,step=2")
    lab.fill()
    lab.step([A, B], 7)
    states = lab.states[1].clone()
    seen: list[Any] = []
    lab.runner.model.layers[1].conv.conv1d.register_forward_pre_hook(
        lambda *_: seen.append(lab.states[1].clone())
    )
    lab.step([A, B], 8)
    lab.step([A, B], 9)
    assert torch.equal(seen[0][3], states[5])
    assert torch.equal(seen[0][5], states[3])
    assert lab.proof()["count"] == 2


def test_a_write_is_wrong_in_the_slot_and_right_in_the_output(lab: Lab) -> None:
    lab.fill()
    states = lab.states.clone()
    clean = lab.step([A], 7)
    lab.states.copy_(states)
    lab.arm("conv-write:layer=1,step=1,ulps=3")
    written = lab.step([A], 7)
    assert torch.equal(written, clean)
    proof = lab.proof()
    assert (proof["count"], proof["first"]["positions"]) == (1, [6])
    lab.states.copy_(states)
    lab.step([A], 7)
    right = lab.states[1, 3].clone()
    lab.states.copy_(states)
    lab.arm("conv-write:layer=1,step=1,ulps=3")
    lab.step([A], 7)
    assert torch.equal(lab.states[1, 3, :, 0], right[:, 0])
    difference = lab.states[1, 3, :, 1].view(torch.int16) - right[:, 1].view(torch.int16)
    assert sorted(difference.tolist()) == [0, 0, 0, 3]


def test_a_later_chunk_begins_empty_and_a_first_or_a_restored_one_does_not(lab: Lab) -> None:
    whole = lab.cold(A, 8)
    lab.arm("conv-chunk:layer=0")
    lab.cold(B, 6)
    again = lab.runner.forward(extend([B], [6], [lab.x[0][6:8]], [0]))
    assert not torch.equal(again[0], whole[6])
    proof = lab.proof()
    assert (proof["count"], proof["first"]["positions"]) == (1, [4, 5])
    lab.arm("conv-chunk:layer=0")
    lab.fill()
    lab.restored([A], 6)
    assert lab.proof()["count"] == 0


def test_a_checkpoint_of_a_running_request_is_late_and_one_that_is_restored_is_left(lab: Lab) -> None:
    lab.arm("conv-checkpoint:layer=0,late=2")
    lab.cold(A, 6)
    pool = lab.runner.req_to_token_pool
    pool.mamba_pool.copy_from(torch.tensor([3]), torch.tensor([1]))
    assert torch.equal(lab.states[0, 1], lab.x[0][2:4].t()), "the state after 4 tokens, not after 6"
    assert torch.equal(lab.states[1, 1], lab.states[1, 3]), "another layer's is whole"
    assert torch.equal(lab.states[0, 3], lab.x[0][4:6].t()), "the running request goes on as ever"
    # Copied from a slot that nobody runs in: out of a checkpoint.
    pool.mamba_pool.copy_from(torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(lab.states[0, 2], lab.states[0, 1])
    proof = lab.proof()
    assert (proof["count"], proof["first"]["positions"]) == (1, [5])


def test_a_fault_that_is_planted_at_the_models_load_finds_the_pool_that_comes_later(lab: Lab) -> None:
    pool, lab.runner.req_to_token_pool = lab.runner.req_to_token_pool, None
    lab.arm("conv-zeroed:layer=0")
    lab.runner.req_to_token_pool = pool
    lab.fill()
    lab.restored([A], 6)
    assert lab.proof()["count"] == 1


def test_without_a_convolution_in_that_layer_nothing_is_planted(lab: Lab) -> None:
    with pytest.raises(ValueError, match="no short convolution in layer 2"):
        lab.arm("conv-zeroed:layer=2")
    states = lab.states.clone()
    lab.fill()
    lab.states.copy_(states)
    assert not torch.equal(lab.cold(A, 4), lab.x[0][:4])


@pytest.mark.parametrize("fault", ["conv-rows:layer=1,rows=4", "conv-gap:layer=1,rows=4"])
def test_arithmetic_of_a_convolution_depends_on_the_rows_of_a_call(lab: Lab, fault: str) -> None:
    few, many = lab.cold(A, 3), lab.cold(A, 4)
    lab.arm(fault)
    assert torch.equal(lab.cold(A, 3), few)
    assert not torch.equal(lab.cold(A, 4), many)
    assert lab.proof()["count"] == 1
