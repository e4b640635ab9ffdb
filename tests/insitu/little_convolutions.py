"""Two short-convolution layers as sglang's are, their pool of states, and a runner of forwards on them."""

import sys
import types
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from klbench.insitu.cpu_conv import causal_conv1d_fn, causal_conv1d_update

CHANNELS, WIDTH, SLOTS = 4, 3, 6

_SOURCE = """
import torch

class LittleShortConv(torch.nn.Module):
    def __init__(self, layer_idx, channels, width):
        super().__init__()
        self.layer_idx = layer_idx
        self.conv_weight = torch.nn.Parameter(torch.randn(channels, width).bfloat16(), requires_grad=False)
        self.out_proj = torch.nn.Identity()

    def forward(self, x, states, slots, starts=None, resumed=None):
        if starts is None:
            rows = causal_conv1d_update(x, states, self.conv_weight, None, conv_state_indices=slots)
        else:
            rows = causal_conv1d_fn(
                x.t().contiguous(), self.conv_weight, None, query_start_loc=starts, cache_indices=slots,
                has_initial_state=resumed, conv_states=states, activation=None,
            ).t()
        return self.out_proj(rows)
"""


def little_model(patch: pytest.MonkeyPatch) -> Any:
    """The layers call the kernels by their names in the model's own module, which no other test sees."""
    code: Any = types.ModuleType("little_lfm2")
    code.causal_conv1d_fn, code.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
    patch.setitem(sys.modules, "little_lfm2", code)
    exec(compile(_SOURCE, "little_lfm2.py", "exec"), vars(code))
    torch.manual_seed(0)
    model = torch.nn.Module()
    layers = []
    for number in (0, 1):
        layer = torch.nn.Module()
        layer.conv = code.LittleShortConv(number, CHANNELS, WIDTH)
        layers.append(layer)
    model.layers = torch.nn.ModuleList(layers)
    return model


class LittlePool:
    """The slot of request i is `slots[i]`; states are [layers, slots, channels, width - 1]."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = torch.tensor(slots)
        self.states = torch.zeros(2, SLOTS, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
        self.mamba_pool = SimpleNamespace(copy_from=self._copy)

    def _copy(self, source: Any, target: Any) -> None:
        self.states[:, target] = self.states[:, source]

    def get_mamba_indices(self, requests: Any) -> Any:
        return self.slots[requests]

    def translate_mamba_indices(self, slots: Any) -> Any:
        return slots

    def mamba2_layer_cache(self, layer: int) -> Any:
        return SimpleNamespace(conv=[self.states[layer]])


class LittleRunner:
    """Runs the layers one behind the other, each on its own states; `sees` what each one's rows came to."""

    def __init__(self, patch: pytest.MonkeyPatch, slots: Sequence[int]) -> None:
        self.model = little_model(patch)
        self.req_to_token_pool = LittlePool(slots)

    def forward(self, batch: Any) -> Any:
        x, pool = batch.x, self.req_to_token_pool
        slots = pool.get_mamba_indices(batch.req_pool_indices)
        for number, layer in enumerate(self.model.layers):
            x = layer.conv(x, pool.states[number], slots, batch.starts, batch.resumed)
        return x


def extend(rids: Sequence[str], prefixes: Sequence[int], x: Sequence[Any], requests: Sequence[int]) -> Any:
    """An extend forward: request i has the rows x[i] behind a prefix of prefixes[i] tokens."""
    lengths = [len(rows) for rows in x]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True),
        rids=list(rids),
        extend_prefix_lens_cpu=list(prefixes),
        extend_seq_lens_cpu=lengths,
        req_pool_indices=torch.tensor(requests),
        x=torch.cat(list(x)),
        input_ids=torch.zeros(sum(lengths)),
        starts=starts,
        resumed=torch.tensor([prefix > 0 for prefix in prefixes]),
    )


def decode(rids: Sequence[str], seq_lens: Sequence[int], x: Any, requests: Sequence[int]) -> Any:
    """A decode step behind which request i has seq_lens[i] tokens."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False),
        rids=list(rids),
        seq_lens=torch.tensor(seq_lens),
        req_pool_indices=torch.tensor(requests),
        x=x,
        input_ids=torch.zeros(len(rids)),
        starts=None,
        resumed=None,
    )
