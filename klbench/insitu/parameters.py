"""The parameters of gated delta rules, beside the dumps: klbench recomputes the operator with them.

    parameters-0.safetensors     "model.layers.0.linear_attn.attn/conv_weights" [channels, width], .../bias,
                                 .../A_log [heads], .../dt_bias [heads]; metadata {"modules": JSON}, by path
                                 {"num_k_heads": 16, ..., "head_v_dim": 128, "activation": "silu"}

A module is known by its attributes (sglang's RadixLinearAttention). One whose gates are others, one for each
channel of a key or bounded from below, is none of these; it is left out, as is what is not small.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch
from safetensors.torch import save_file

_SIZES = ("num_q_heads", "num_k_heads", "num_v_heads", "head_q_dim", "head_k_dim", "head_v_dim")
_MOST_BYTES = 32 << 20
"""Of all modules together; one of Qwen3-Next has 64 KiB."""


def write_parameters(model: torch.nn.Module, pattern: Optional[str], path: Path) -> int:
    """Writes those of the modules whose outputs the dumper writes under names that match `pattern` (None: all
    names do); returns how many. Without one there is no file."""
    modules: Dict[str, Dict[str, Any]] = {}
    tensors: Dict[str, torch.Tensor] = {}
    written = 0
    for name, module in model.named_modules():
        if pattern is not None and re.search(pattern, f"non_intrusive__{name}.output") is None:
            continue
        found = _delta_rule(module)
        if found is None:
            continue
        about, own = found
        size = sum(tensor.numel() * tensor.element_size() for tensor in own.values())
        if written + size > _MOST_BYTES:
            continue
        written += size
        modules[name] = about
        for short, tensor in own.items():
            tensors[f"{name}/{short}"] = tensor.detach().to("cpu", copy=True).contiguous()
    if modules:
        save_file(tensors, str(path), metadata={"modules": json.dumps(modules)})
    return len(modules)


def _delta_rule(module: torch.nn.Module) -> Optional[Tuple[Dict[str, Any], Dict[str, torch.Tensor]]]:
    """The module's sizes and its tensors, None where it is no gated delta rule."""
    about: Dict[str, Any] = {name: getattr(module, name, None) for name in _SIZES}
    if not all(isinstance(size, int) and size > 0 for size in about.values()):
        return None
    tensors: Dict[str, Any] = {
        name: getattr(module, name, None) for name in ("conv_weights", "A_log", "dt_bias")
    }
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        return None
    bias = getattr(module, "bias", None)
    if isinstance(bias, torch.Tensor):
        tensors["bias"] = bias
    elif bias is not None:
        return None
    heads = about["num_v_heads"]
    channels = (
        about["num_q_heads"] * about["head_q_dim"]
        + about["num_k_heads"] * about["head_k_dim"]
        + heads * about["head_v_dim"]
    )
    conv = tensors["conv_weights"]
    gates = tensors["A_log"].numel() == tensors["dt_bias"].numel() == heads
    bounded = getattr(module, "lower_bound", None) is not None
    if not gates or bounded or conv.dim() != 2 or conv.shape[0] != channels:
        return None
    about["activation"] = getattr(module, "activation", None)
    return about, {
        name: tensor.reshape(-1) if tensor is not conv else conv for name, tensor in tensors.items()
    }
