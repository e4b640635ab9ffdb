"""Causal short convolutions on the CPU, in the place of sglang's Triton kernels.

Both functions have sglang's own signatures (sglang/srt/layers/attention/mamba/causal_conv1d.py) and the same
arithmetic for a token, whether an extend or a decode step computes it: the products with the newest `width`
inputs, summed in float64 from the oldest to the newest and rounded once. So a token's result does not depend
on how its sequence was cut, nor on its neighbours in the batch:

    y[t] = bias + sum over i < width of  weight[:, i] * x[t - width + 1 + i]

A state is a sequence's newest `width - 1` inputs, oldest first; before its beginning they are zero.
"""

import importlib
from typing import Any, Optional

import torch

PAD_SLOT_ID = -1


_MODULE = "sglang.srt.layers.attention.mamba.causal_conv1d"


def supply_causal_conv1d() -> bool:
    """Puts our functions where sglang's models look for them, before any model's module is imported.

    False where this sglang has no such place: models without convolutions run all the same.
    """
    try:
        module: Any = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if not _MODULE.startswith(str(error.name)):
            raise
        return False
    module.causal_conv1d_fn = causal_conv1d_fn
    module.causal_conv1d_update = causal_conv1d_update
    return True


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    query_start_loc: Optional[torch.Tensor] = None,
    cache_indices: Optional[torch.Tensor] = None,
    has_initial_state: Optional[torch.Tensor] = None,
    conv_states: Optional[torch.Tensor] = None,
    activation: Optional[str] = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    **kwargs: Any,
) -> torch.Tensor:
    """The convolution over sequences that stand one after the other in x [dim, tokens]; a tensor like x.

    Sequence i is tokens [query_start_loc[i], query_start_loc[i+1]) and its state row `cache_indices[i]` of
    `conv_states` [slots, dim, width - 1]: read where `has_initial_state[i]`, always replaced. Sequences with
    the slot `pad_slot_id` are left zero. Raises NotImplementedError for options that no model here uses.
    """
    _refuse({name: value for name, value in kwargs.items() if name != "seq_lens_cpu"})
    if query_start_loc is None or x.dim() != 2:
        raise NotImplementedError("a convolution over a padded batch is not available on the CPU")
    starts = query_start_loc.tolist()
    slots = range(len(starts) - 1) if cache_indices is None else cache_indices.tolist()
    resumed = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    result = torch.zeros_like(x)
    behind = weight.shape[-1] - 1
    for place, slot in enumerate(slots):
        own = slice(starts[place], starts[place + 1])
        if slot == pad_slot_id or own.start == own.stop:
            continue
        before = x.new_zeros((x.shape[0], behind))
        if resumed[place] and conv_states is not None:
            before = conv_states[slot, :, :behind].to(x.dtype)
        window = torch.cat([before, x[:, own]], dim=-1)
        result[:, own] = _convolved(window, weight, bias, activation).to(x.dtype)
        if conv_states is not None:
            conv_states[slot, :, :behind] = window[:, window.shape[-1] - behind :].to(conv_states.dtype)
    return result


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    activation: Optional[str] = None,
    cache_seqlens: Optional[torch.Tensor] = None,
    conv_state_indices: Optional[torch.Tensor] = None,
    pad_slot_id: int = PAD_SLOT_ID,
    **kwargs: Any,
) -> torch.Tensor:
    """One decode step, or a few at once: x [batch, dim] or [batch, dim, tokens]; a tensor like x.

    Request i reads and replaces row `conv_state_indices[i]` of `conv_state` [slots, dim, state length]; the
    state's newest `width - 1` columns count. Rows with the slot `pad_slot_id` are left zero. Raises
    NotImplementedError for circular states (`cache_seqlens`) and what no model here uses.
    """
    _refuse({"cache_seqlens": cache_seqlens, **kwargs})
    steps = x.unsqueeze(-1) if x.dim() == 2 else x
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices.long()
    kept = slots != pad_slot_id
    result = torch.zeros_like(steps)
    states = conv_state[slots[kept]]
    window = torch.cat([states.to(x.dtype), steps[kept]], dim=-1)
    behind = weight.shape[-1] - 1
    newest = window[..., window.shape[-1] - steps.shape[-1] - behind :]
    result[kept] = _convolved(newest, weight, bias, activation).to(x.dtype)
    conv_state[slots[kept]] = window[..., window.shape[-1] - states.shape[-1] :].to(conv_state.dtype)
    return result.view(x.shape)


def _convolved(
    window: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], activation: Optional[str]
) -> torch.Tensor:
    """window [..., dim, width - 1 + tokens] * weight [dim, width] -> [..., dim, tokens] in float64."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"the activation {activation} is not available on the CPU")
    width = weight.shape[-1]
    tokens = window.shape[-1] - width + 1
    wide, taps = window.double(), weight.double()
    total = wide.new_zeros((*window.shape[:-1], tokens))
    for tap in range(width):
        total += wide[..., tap : tap + tokens] * taps[:, tap, None]
    if bias is not None:
        total += bias.double()[:, None]
    return total if activation is None else torch.nn.functional.silu(total)


def _refuse(options: "dict[str, Any]") -> None:
    used = sorted(name for name, value in options.items() if value is not None)
    if used:
        raise NotImplementedError(f"{', '.join(used)} of a short convolution is not available on the CPU")
