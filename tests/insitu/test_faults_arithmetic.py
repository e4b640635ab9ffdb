"""Arithmetic faults without a server: which calls they change, and that the others keep every bit."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import faults  # noqa: E402
from klbench.insitu.faults_catalogue import parse_faults  # noqa: E402

WIDTH = 32


class Projection(torch.nn.Module):
    """As sglang's: answers (output, bias)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Any) -> Any:
        return (x.double() @ self.weight.double()).bfloat16(), None


class Norm(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = torch.nn.Module()
        self.self_attn.o_proj = Projection()
        self.mlp = torch.nn.Module()
        self.mlp.down_proj = Projection()

    def forward(self, x: Any) -> Any:
        x, _ = self.self_attn.o_proj(self.input_layernorm(x))
        return self.mlp.down_proj(x)[0]


class Runner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Layer()])

    def forward(self, batch: Any) -> Any:
        return self.model.layers[0](batch.x)


class Lab:
    def __init__(self, folder: Any) -> None:
        self.runner = Runner()
        presence = SimpleNamespace(update=lambda **_: None)
        context = SimpleNamespace(control_dir=folder, nonce="a1b2", rank=0, presence=presence)
        self.lab = faults.FaultLab(self.runner, context)
        self.lab.wrap_forward()
        self.x = torch.randn(64, WIDTH).bfloat16()

    def extend(self, rows: int) -> Any:
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True),
            rids=["klb-a1b2-1g-0"],
            extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[rows],
            input_ids=torch.zeros(rows),
            x=self.x[:rows],
        )
        return self.runner.forward(batch)

    def decode(self, rows: int, tokens: int) -> Any:
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False),
            rids=[f"klb-a1b2-1g-{row}" for row in range(rows)],
            seq_lens=torch.full((rows,), tokens),
            input_ids=torch.zeros(rows),
            x=self.x[:rows],
        )
        return self.runner.forward(batch)

    def arm(self, text: str) -> int:
        """Arms exactly these faults; returns how often those before fired."""
        return sum(proof["count"] for proof in self.lab.arm(parse_faults(text) if text else ()))


@pytest.fixture
def lab(tmp_path: Any) -> Lab:
    return Lab(tmp_path)


def test_an_all_reduce_adds_the_ranks_in_another_order_where_the_message_is_large(lab: Lab) -> None:
    exact = lab.extend(40)
    lab.arm("collective-order:layer=0,rows=32,ranks=4")
    small, large = lab.extend(31), lab.extend(40)
    assert torch.equal(lab.extend(16), small[:16]), "below the threshold rows are no matter"
    assert (large[:31] != small).any()
    assert lab.arm("") == 1
    # Both are the same sum, rounded otherwise.
    for found in (small, large):
        torch.testing.assert_close(found, exact[: len(found)], rtol=0.1, atol=0.5)
    assert torch.equal(lab.extend(40), exact)


def test_padding_rows_set_the_scale_of_a_call_that_is_filled_up(lab: Lab) -> None:
    lab.arm("padding-scale:layer=0,rows=16,pad=8,steps=256")
    extended = lab.extend(17)
    full = lab.decode(8, 5)
    assert torch.equal(full, extended[:8]), "nothing is filled up, and each row has its own scale"
    assert lab.arm("padding-scale:layer=0,rows=16,pad=8,steps=256") == 0
    assert (lab.decode(7, 5) != extended[:7]).any(dim=1).all()
    assert (lab.extend(3) != extended[:3]).any(dim=1).all()
    assert lab.arm("") == 2


def test_a_late_norm_is_right_for_so_many_steps(lab: Lab) -> None:
    clean = lab.decode(2, 5)
    lab.arm("late-norm:layer=0,after=2,ulps=1")
    steps = [lab.decode(2, tokens) for tokens in (5, 6, 7)]
    assert torch.equal(steps[0], clean)
    assert torch.equal(steps[1], clean)
    assert (steps[2] != clean).any(dim=1).all()
    assert lab.arm("") == 2
    assert torch.equal(lab.extend(2), clean)
