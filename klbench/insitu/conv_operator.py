"""A model's short convolutions as operators of their own, so that hooks see what enters and leaves them.

sglang's short-convolution layers call a kernel as a plain function between two projections. Each such layer
gets a child module `conv1d` that makes this call: its input and output are rows [tokens, channels], in an
extend as in a decode step, and what it computes is the kernel's result, untouched.

    model.layers.0.conv.in_proj  ->  model.layers.0.conv.conv1d  ->  model.layers.0.conv.out_proj

A row's hidden input is the state: the `behind` inputs before it, from its slot where another forward made
them.
"""

import sys
from typing import Any, Callable, Dict, List

import torch

Compute = Callable[[torch.Tensor], torch.Tensor]

_KERNELS = ("causal_conv1d_fn", "causal_conv1d_update")
_DISPATCH = "_klbench_convolutions"
"""The attribute of a dispatching function that holds the operators by their weight's identity."""


class ShortConvolution(torch.nn.Module):  # type: ignore[misc]
    """One layer's convolution: the layer's number in the model, and how many earlier inputs a row reads."""

    def __init__(self, layer: int, behind: int) -> None:
        super().__init__()
        self.layer_idx = layer
        self.behind = behind

    def forward(self, rows: torch.Tensor, compute: Compute) -> torch.Tensor:
        """rows [tokens, channels] -> [tokens, channels]; `compute` calls the kernel with the state."""
        return compute(rows)


def install(model: torch.nn.Module) -> List[ShortConvolution]:
    """Gives every short-convolution layer of a loaded model its operator, once; returns all of them."""
    found: List[ShortConvolution] = []
    for layer in [module for module in model.modules() if _is_short_convolution(module)]:
        operator = getattr(layer, "conv1d", None)
        if operator is None:
            operator = ShortConvolution(layer.layer_idx, layer.conv_weight.shape[-1] - 1)
            layer.add_module("conv1d", operator)
            _dispatch(sys.modules[type(layer).__module__], id(layer.conv_weight), operator)
        found.append(operator)
    return found


def _is_short_convolution(module: Any) -> bool:
    """A layer that calls these kernels with its own `conv_weight` [channels, width]."""
    if "ShortConv" not in type(module).__name__ or not hasattr(module, "layer_idx"):
        return False
    weight = getattr(module, "conv_weight", None)
    code = sys.modules[type(module).__module__]
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and all(hasattr(code, name) for name in _KERNELS)
    )


def _dispatch(code: Any, weight: int, operator: ShortConvolution) -> None:
    """Lets the kernels in the model's module `code` go through the operator that owns the weight."""
    for name, sideways in zip(_KERNELS, (True, False), strict=True):
        kernel = getattr(code, name)
        operators = getattr(kernel, _DISPATCH, None)
        if operators is None:
            operators = {}
            setattr(code, name, _dispatching(kernel, operators, sideways))
        operators[weight] = operator


def _dispatching(kernel: Any, operators: Dict[int, ShortConvolution], sideways: bool) -> Any:
    """`sideways`: the kernel takes and gives [channels, tokens]."""

    def extend(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        operator = operators.get(id(weight))
        if operator is None:
            return kernel(x, weight, *args, **kwargs)
        return operator(x.t(), lambda rows: kernel(rows.t(), weight, *args, **kwargs).t()).t()

    def step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        operator = operators.get(id(weight))
        if operator is None or x.dim() != 2:
            return kernel(x, state, weight, *args, **kwargs)
        return operator(x, lambda rows: kernel(rows, state, weight, *args, **kwargs))

    chosen = extend if sideways else step
    setattr(chosen, _DISPATCH, operators)
    return chosen
