"""A short convolution as an operator: seen row by row, its state read as rows, its kernel untouched."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import conv_operator  # noqa: E402
from klbench.insitu.capture import describe_modules  # noqa: E402
from klbench.insitu.conv_operator import ShortConvolution  # noqa: E402
from klbench.insitu.conv_reads import ConvolutionRead  # noqa: E402
from klbench.insitu.cpu_conv import causal_conv1d_fn, causal_conv1d_update  # noqa: E402

CHANNELS, WIDTH = 4, 3


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two layers as sglang's are: they call the kernels by their names in the model's own module."""
    code: Any = types.ModuleType("little_lfm2")
    source = """
import torch
class LittleShortConv(torch.nn.Module):
    def __init__(self, layer_idx, channels, width):
        super().__init__()
        self.layer_idx = layer_idx
        self.conv_weight = torch.nn.Parameter(torch.randn(channels, width), requires_grad=False)
        self.states = torch.zeros(6, channels, width - 1)
    def forward(self, x, slots, starts=None, resumed=None):
        if starts is None:
            return causal_conv1d_update(x, self.states, self.conv_weight, None, conv_state_indices=slots)
        return causal_conv1d_fn(x.t().contiguous(), self.conv_weight, None, query_start_loc=starts,
            cache_indices=slots, has_initial_state=resumed, conv_states=self.states, activation=None).t()
"""
    code.causal_conv1d_fn, code.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
    monkeypatch.setitem(sys.modules, "little_lfm2", code)
    exec(compile(source, "little_lfm2.py", "exec"), vars(code))
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([code.LittleShortConv(n, CHANNELS, WIDTH) for n in (0, 1)])
    return model


def _extend(layer: Any, x: Any, slot: int, resumed: bool = False) -> Any:
    starts = torch.tensor([0, len(x)], dtype=torch.int32)
    return layer(x, torch.tensor([slot]), starts, torch.tensor([resumed]))


def test_each_layer_gets_one_operator_that_sees_rows_and_changes_no_bit(model: Any) -> None:
    x, row = torch.randn(5, CHANNELS), torch.randn(2, CHANNELS)
    expected = [(_extend(layer, x, 1), layer(row, torch.tensor([1, 2]))) for layer in model.layers]
    states = [layer.states.clone() for layer in model.layers]
    for layer in model.layers:
        layer.states.zero_()

    operators = conv_operator.install(model)

    assert conv_operator.install(model) == operators, "installed once"
    assert [(operator.layer_idx, operator.behind) for operator in operators] == [(0, 2), (1, 2)]
    about = describe_modules(model)
    named = {"class": "ShortConvolution", "state": "conv", "window": 2, "layer": 1}
    assert about["layers.1.conv1d"] == named
    assert about["layers.1"]["state"] is None, "the operator has the state, not the layer around it"
    seen: list[Any] = []
    for operator in operators:
        operator.register_forward_hook(
            lambda module, args, out: seen.append((module.layer_idx, tuple(args[0].shape), tuple(out.shape)))
        )
    for layer, (extended, stepped) in zip(model.layers, expected, strict=True):
        assert torch.equal(_extend(layer, x, 1), extended)
        assert torch.equal(layer(row, torch.tensor([1, 2])), stepped)
    assert [torch.equal(layer.states, state) for layer, state in zip(model.layers, states, strict=True)] == [
        True,
        True,
    ]
    assert seen == [(number, shape, shape) for number in (0, 1) for shape in ((5, CHANNELS), (2, CHANNELS))]


def test_what_an_operator_is_told_to_compute_on_is_what_the_kernel_gets(model: Any) -> None:
    (first, _) = conv_operator.install(model)
    layer = model.layers[0]
    x = torch.randn(4, CHANNELS)
    doubled = _extend(layer, x * 2, 1)
    original = first.forward
    first.forward = lambda rows, compute: original(rows * 2, compute)
    assert torch.equal(_extend(layer, x, 2), doubled)


def _part(rid: str, first: int, rows: int) -> Any:
    return SimpleNamespace(rid=rid, first_position=first, rows=rows, seq_len=first + rows)


def _read(layer: Any, parts: list[tuple[int, Any]], slots: list[int], rows: Any) -> ConvolutionRead:
    recording: Any = SimpleNamespace(
        rows=SimpleNamespace(parts=tuple(parts)),
        requests=torch.tensor([place for place, _ in parts]),
        selected=lambda tensor: tensor,
    )
    pool = SimpleNamespace(
        get_mamba_indices=lambda requests: torch.tensor(slots)[requests],
        mamba2_layer_cache=lambda _: SimpleNamespace(conv=[layer.states]),
    )
    batch = SimpleNamespace(req_pool_indices=torch.arange(len(slots)))
    return ConvolutionRead(recording, batch, pool, ShortConvolution(0, WIDTH - 1), rows)


@pytest.mark.parametrize(("first", "rows"), [(0, 1), (0, 2), (0, 5), (1, 1), (1, 4), (2, 1), (7, 3)])
def test_a_row_of_state_is_the_same_whether_the_slot_held_it_or_the_call_was_given_it(
    model: Any, first: int, rows: int
) -> None:
    """In one extend or in two forwards: at each position the same input, and the slot that holds it."""
    layer = model.layers[0]
    x = torch.randn(first + rows, CHANNELS)
    if first:
        _extend(layer, x[:first], 3)
    read = _read(layer, [(1, _part("a", first, rows))], [0, 3], x[first:])
    _extend(layer, x[first:], 3, resumed=first > 0)
    slots, found = read.result()
    low = max(0, first - WIDTH + 1)
    assert torch.equal(found, x[low : first + rows])
    assert slots.tolist() == [3] * (first + rows - low)


def test_what_a_slot_holds_wrongly_is_what_is_read(model: Any) -> None:
    layer = model.layers[0]
    x = torch.randn(6, CHANNELS)
    _extend(layer, x[:4], 3)
    layer.states[3, :, 0] += 1
    read = _read(layer, [(0, _part("a", 4, 2))], [3], x[4:])
    _extend(layer, x[4:], 3, resumed=True)
    layer.states[3, :, 1] *= 2
    _, found = read.result()
    assert torch.equal(found[0], x[2] + 1)
    assert torch.equal(found[1:3], x[3:5])
    assert torch.equal(found[3], x[5] * 2)
