"""A stand-in for sglang's kernel package on a machine without a GPU.

The wheel of `sgl_kernel` that the package index has cannot be imported without the CUDA driver, and sglang
imports from it on the CPU too. Here every name exists, in this module, in any submodule and under
`torch.ops.sgl_kernel` where sglang looks it up while importing; exactly one does something, because a plain
forward on the CPU calls exactly one. The others raise NotImplementedError with their name when called.

Names under `torch.ops.sgl_kernel` that sglang only asks for ("is there a fused kernel?") stay absent.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, NoReturn, Optional, Sequence

import torch

# Looked up while a module of sglang is imported, without asking whether they exist.
_LOOKED_UP_AT_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)


class Missing:
    """A name that exists and does nothing."""

    def __init__(self, name: str) -> None:
        self._missing_name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._missing_name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._missing_name} is not available: sglang runs here with a stand-in for its kernels"
        )

    def __repr__(self) -> str:
        return f"<missing {self._missing_name}>"


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"sgl_kernel.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any submodule of this package that no file provides."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],  # noqa: ARG002
        target: Optional[types.ModuleType] = None,  # noqa: ARG002
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        full_name = module.__name__

        def module_getattr(name: str) -> Missing:
            if name.startswith("__"):
                raise AttributeError(name)
            return Missing(f"{full_name}.{name}")

        module.__getattr__ = module_getattr  # type: ignore[method-assign]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    width: int,  # noqa: ARG001
) -> None:
    """Writes each request's new slots, which stand one after the other in `out_cache_loc`, into its row.

    Row `req_pool_indices[i]` of `req_to_token` gets them at columns `start_offset[i]` to `end_offset[i]`;
    `width`, the length of a row, is not needed here.
    """
    start = start_offset.long()
    lengths = end_offset.long() - start
    total = int(lengths.sum())
    first = torch.cumsum(lengths, 0) - lengths
    columns = torch.arange(total) + torch.repeat_interleave(start - first, lengths)
    rows = torch.repeat_interleave(req_pool_indices.long(), lengths)
    req_to_token[rows, columns] = out_cache_loc[:total].to(req_to_token.dtype)


sys.meta_path.append(_Submodules())
for _name in _LOOKED_UP_AT_IMPORT:
    setattr(torch.ops.sgl_kernel, _name, Missing(f"torch.ops.sgl_kernel.{_name}"))
