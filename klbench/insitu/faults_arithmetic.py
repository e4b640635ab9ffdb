"""Faults of token-wise operators: their result depends on what shares the call.

All fire in calls of at least `rows` rows, as kernels that choose their tiles by the row count do, so that
calling the operator again with other row counts shows it too.
"""

import functools
import random
from itertools import pairwise
from typing import Any, List, Tuple

import torch

from .faults_planting import Planting
from .faults_seams import attention_at, module_at, nudged


def _rows(x: torch.Tensor) -> int:
    return int(x.shape[:-1].numel())


def _tensor(result: Any) -> torch.Tensor:
    """The result's first tensor: linear layers answer (output, bias), norms with a residual (x, residual)."""
    found = result[0] if isinstance(result, tuple) else result
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{type(found).__name__} is no tensor that could be changed")
    return found


def _with_tensor(result: Any, tensor: torch.Tensor) -> Any:
    return (tensor, *result[1:]) if isinstance(result, tuple) else tensor


def plant_rows(planting: Planting, *names: str) -> None:
    """The layer's module rounds its largest element otherwise when many rows share the call."""
    module = module_at(planting.model, planting.parameters["layer"], *names)
    threshold, ulps = planting.parameters["rows"], planting.parameters["ulps"]

    def round_otherwise(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = _rows(x)
        result = original(x, *args, **kwargs)
        if rows < threshold:
            return result
        planting.fired_in_call(rows)
        return _with_tensor(result, nudged(_tensor(result), ulps))

    planting.wraps.around(module, "forward", round_otherwise)


def plant_head_norm_rows(planting: Planting) -> None:
    """As plant_rows for the norm of the queries' heads, which sees a row for each head of a token."""
    layer = planting.parameters["layer"]
    module = module_at(planting.model, layer, "self_attn.q_norm")
    heads = attention_at(planting.model, layer).tp_q_head_num
    threshold, ulps = planting.parameters["rows"], planting.parameters["ulps"]

    def round_otherwise(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = x.numel() // (heads * module.weight.shape[-1])
        result = original(x, *args, **kwargs)
        if rows < threshold:
            return result
        planting.fired_in_call(rows)
        return nudged(result, ulps)

    planting.wraps.around(module, "forward", round_otherwise)


def plant_split_sum(planting: Planting) -> None:
    """o_proj adds two rounded half sums when many rows share the call."""
    module = module_at(planting.model, planting.parameters["layer"], "self_attn.o_proj")
    if getattr(module, "bias", None) is not None:
        raise ValueError("o_proj-rows needs an o_proj without a bias")
    threshold = planting.parameters["rows"]

    def split_sum(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[0] < threshold:
            return original(x, *args, **kwargs)
        middle = x.shape[-1] // 2
        left, right = x.clone(), x.clone()
        left[..., middle:] = 0
        right[..., :middle] = 0
        # RowParallelLinear returns (output, bias), and may write both times to one buffer of its caller.
        half_sum = original(left, *args, **kwargs)[0].clone()
        output, *rest = original(right, *args, **kwargs)
        output.add_(half_sum)
        planting.fired_in_call(x.shape[0])
        return (output, *rest)

    planting.wraps.around(module, "forward", split_sum)


def plant_collective_order(planting: Planting) -> None:
    """o_proj adds the rounded parts of `ranks` ranks, in another order where the message is large.

    An all-reduce chooses its algorithm by the message's size. This server has one rank: each part is what a
    rank with its share of the input would have put out.
    """
    module = module_at(planting.model, planting.parameters["layer"], "self_attn.o_proj")
    if getattr(module, "bias", None) is not None:
        raise ValueError("collective-order needs an o_proj without a bias")
    threshold, ranks = planting.parameters["rows"], planting.parameters["ranks"]

    def all_reduced(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        edges = [x.shape[-1] * rank // ranks for rank in range(ranks + 1)]
        parts: List[torch.Tensor] = []
        output, rest = x, []
        for low, high in pairwise(edges):
            own = torch.zeros_like(x)
            own[..., low:high] = x[..., low:high]
            # RowParallelLinear returns (output, bias), and may write each time to one buffer of its caller.
            output, *rest = original(own, *args, **kwargs)
            parts.append(output.clone())
        if _rows(x) >= threshold:
            planting.fired_in_call(_rows(x))
            # Each rank's part meets its neighbour's first.
            parts = [functools.reduce(torch.add, parts[side::2]) for side in (1, 0) if parts[side::2]]
        output.copy_(functools.reduce(torch.add, parts))
        return (output, *rest)

    planting.wraps.around(module, "forward", all_reduced)


def plant_padding_scale(planting: Planting) -> None:
    """down_proj's input is rounded to steps of each row's own largest value, or of a padding row's.

    A call of fewer than `rows` rows is filled up to a multiple of `pad`, and the rows that fill it up hold
    garbage, whose largest value is taken for all rows.
    """
    module = module_at(planting.model, planting.parameters["layer"], "mlp.down_proj")
    steps, pad, threshold = (planting.parameters[name] for name in ("steps", "pad", "rows"))

    def quantised(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        largest = x.abs().amax(dim=-1, keepdim=True).float()
        if _rows(x) < threshold and _rows(x) % pad:
            planting.fired_in_call(_rows(x))
            largest = torch.full_like(largest, 2 * float(largest.max()))
        scale = largest.clamp(min=1e-30) / steps
        return original(((x.float() / scale).round() * scale).to(x.dtype), *args, **kwargs)

    planting.wraps.around(module, "forward", quantised)


def plant_late_norm(planting: Planting) -> None:
    """After some decode steps of a request the layer's first norm rounds its rows otherwise."""
    module = module_at(planting.model, planting.parameters["layer"], "input_layernorm", "operator_norm")
    after, ulps = planting.parameters["after"], planting.parameters["ulps"]

    def late(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        parts = [part for part in planting.moment.parts if part.step > after]
        if not parts:
            return result
        changed = _tensor(result).clone()
        for part in parts:
            changed[part.row] = nudged(changed[part.row], ulps)
            planting.fired(part, [part.prefix_len])
        return _with_tensor(result, changed)

    planting.wraps.around(module, "forward", late)


def plant_batch_scale(planting: Planting) -> None:
    """down_proj's input is rounded to a scale taken over the whole call, as dynamic quantisation does."""
    module = module_at(planting.model, planting.parameters["layer"], "mlp.down_proj")
    steps = planting.parameters["steps"]

    def quantised(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = x.abs().max().float() / steps
        planting.fired_in_call(_rows(x))
        rounded = (x.float() / scale).round() * scale
        return original(rounded.to(x.dtype), *args, **kwargs)

    planting.wraps.around(module, "forward", quantised)


def plant_race(planting: Planting) -> None:
    """o_proj's result changes in one call of `odds`, at random: a run does not repeat itself."""
    module = module_at(planting.model, planting.parameters["layer"], "self_attn.o_proj")
    odds, ulps = max(1, planting.parameters["odds"]), planting.parameters["ulps"]
    chance = random.SystemRandom()

    def sometimes(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(x, *args, **kwargs)
        if chance.randrange(odds):
            return result
        planting.fired_in_call(_rows(x))
        return _with_tensor(result, nudged(_tensor(result), ulps))

    planting.wraps.around(module, "forward", sometimes)


def plant_gap(planting: Planting, *names: str) -> None:
    """On their way to the layer's module the rows change when many share the call: no module did it."""
    module = module_at(planting.model, planting.parameters["layer"], *names)
    threshold, ulps = planting.parameters["rows"], planting.parameters["ulps"]

    def changed(x: torch.Tensor) -> torch.Tensor:
        rows = _rows(x)
        if rows < threshold:
            return x
        planting.fired_in_call(rows)
        return nudged(x, ulps)

    planting.wraps.before_call(module, changed)


def plant_lm_head_rows(planting: Planting) -> None:
    """The LM head rounds otherwise when many rows share the call: scoring does, generating does not."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    threshold, ulps = planting.parameters["rows"], planting.parameters["ulps"]

    def round_otherwise(original: Any, *args: Any, **kwargs: Any) -> Any:
        logits = original(*args, **kwargs)
        rows = _rows(logits)
        if rows < threshold:
            return logits
        planting.fired_in_call(rows)
        return nudged(logits, ulps)

    planting.wraps.around_method(LogitsProcessor, "_compute_lm_head", round_otherwise)


def plant_log_of_softmax(planting: Planting) -> None:
    """The sampler takes the logarithm of a softmax where scoring takes log-softmax."""
    from sglang.srt.layers.sampler import Sampler

    places: Tuple[Tuple[Any, str], ...] = ((torch.nn.functional, "log_softmax"), (torch, "log_softmax"))

    def sample(original: Any, *args: Any, **kwargs: Any) -> Any:
        before = [getattr(owner, name) for owner, name in places]
        for owner, name in places:
            setattr(owner, name, log_of_softmax)
        try:
            return original(*args, **kwargs)
        finally:
            for (owner, name), function in zip(places, before, strict=True):
                setattr(owner, name, function)

    def log_of_softmax(x: torch.Tensor, dim: int = -1, **kwargs: Any) -> torch.Tensor:
        for part in planting.moment.parts[:1]:
            planting.fired(part, [part.seq_len - 1])
        return torch.log(torch.softmax(x, dim, **kwargs))

    planting.wraps.around_method(Sampler, "forward", sample)
