"""Deterministic inference on the CPU: the doors of sglang opened for `torch_native`, and exact products.

Claim: a token's result does not depend on how many rows share its call. Linear layers, matrix products and
attention are summed in float64 and rounded to the model's type at the end. Sums of bfloat16 products are
exact there for practical purposes, so neither the blocking nor the order of a sum can be seen:

    >>> x, w = torch.randn(300, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    >>> torch.equal(F.linear(x, w)[7:8], F.linear(x[7:8], w))
    True

The products are replaced below the dispatcher, at the CPU key: whoever calls `F.linear`, `torch.matmul`,
`einsum` or scaled-dot-product attention gets them. `out=` variants are left as they are and do the work.
Everything else in a forward works row by row already.
"""

import importlib
from typing import Any, Optional

import torch

from . import cpu_conv, cpu_ranks

BACKEND = "torch_native"
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


def install(context: Any) -> None:
    """Opens the doors in this process and, where a model may run, supplies the batch-invariant mode."""
    open_deterministic_doors()
    context.presence.add_hooks("cpu_engine.choices")
    if context.may_hold_a_model:
        supply_batch_invariant_mode(lambda: context.presence.add_hooks("cpu_engine.batch_invariant_mode"))
        cpu_ranks.make_groups_without_nccl()
        if cpu_conv.supply_causal_conv1d():
            context.presence.add_hooks("cpu_engine.causal_conv1d")


def open_deterministic_doors() -> None:
    """Lets `--enable-deterministic-inference` accept `torch_native`, with the radix cache on."""
    doors = [
        "add_deterministic_attention_backend_choices",
        "add_radix_supported_deterministic_attention_backend_choices",
    ]
    for module_name in ("sglang.srt.arg_groups.choices", "sglang.srt.server_args"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # 0.5.17 keeps the doors in server_args and has no arg_groups.choices.
            if not module_name.startswith(str(error.name)):
                raise
            continue
        if all(hasattr(module, door) for door in doors):
            for door in doors:
                getattr(module, door)([BACKEND])
            return
    raise RuntimeError("this sglang has no door for another deterministic attention backend")


def supply_batch_invariant_mode(when_enabled: Any) -> None:
    """Puts the CPU's own `enable_batch_invariant_mode` in the place of the Triton one."""
    package: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    module: Any = importlib.import_module("sglang.srt.batch_invariant_ops.batch_invariant_ops")

    def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:  # noqa: ARG001 - sglang's signature
        if module._batch_invariant_MODE:
            return
        library = torch.library.Library("aten", "IMPL")
        register_exact_products(library)
        module._batch_invariant_LIB = library
        module._batch_invariant_MODE = True
        when_enabled()

    package.enable_batch_invariant_mode = enable_batch_invariant_mode
    module.enable_batch_invariant_mode = enable_batch_invariant_mode


def register_exact_products(library: Any) -> None:
    """Registers the float64 products for CPU tensors in `library` of "aten"; they live as long as it."""
    library.impl("mm", exact_mm, "CPU")
    library.impl("addmm", exact_addmm, "CPU")
    library.impl("bmm", exact_bmm, "CPU")
    library.impl("scaled_dot_product_attention", exact_attention, "CPU")


def exact_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [k, n] -> [m, n] in a's type, summed in float64."""
    if a.dtype not in _NARROW:
        return torch.mm(a, b, out=a.new_empty((a.shape[0], b.shape[1])))
    wide = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float64)
    return torch.mm(a.double(), b.double(), out=wide).to(a.dtype)


def exact_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [s, m, k] @ b [s, k, n] -> [s, m, n] in a's type, summed in float64."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    if a.dtype not in _NARROW:
        return torch.bmm(a, b, out=a.new_empty(shape))
    return torch.bmm(a.double(), b.double(), out=a.new_empty(shape, dtype=torch.float64)).to(a.dtype)


def exact_addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """beta * bias + alpha * (a @ b) in a's type, summed in float64."""
    shape = (a.shape[0], b.shape[1])
    if a.dtype not in _NARROW:
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(shape))
    wide = a.new_empty(shape, dtype=torch.float64)
    return torch.addmm(bias.double(), a.double(), b.double(), beta=beta, alpha=alpha, out=wide).to(a.dtype)


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled-dot-product attention as torch defines it, in float64 and rounded once.

    query [..., heads, rows, d], key and value [..., kv_heads, keys, d]; the result is like the query.
    """
    if dropout_p:
        raise NotImplementedError("dropout is no part of inference")
    rows, keys = query.shape[-2], key.shape[-2]
    q, k, v = query.double(), key.double(), value.double()
    groups = 1
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        # Query heads that share a key head are stacked as rows: nothing is copied.
        groups = query.shape[-3] // key.shape[-3]
        q = q.reshape(*q.shape[:-3], key.shape[-3], groups * rows, q.shape[-1])
    scores = torch.matmul(q, k.transpose(-2, -1)).mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.view(*query.shape[:-1], keys)
    if is_causal:
        scores.masked_fill_(torch.ones(rows, keys, dtype=torch.bool).triu_(1), float("-inf"))
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores.masked_fill_(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores += attn_mask
    weights = torch.softmax(scores, dim=-1)
    if groups > 1:
        weights = weights.view(*k.shape[:-2], groups * rows, keys)
    result = torch.matmul(weights, v)
    return result.view(*query.shape[:-1], value.shape[-1]).to(query.dtype)
