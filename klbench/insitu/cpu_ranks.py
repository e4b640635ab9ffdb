"""Several ranks on a CPU: sglang's groups of ranks without NCCL.

A tensor on the CPU is summed over the ranks by gloo, whatever communicators a group has, yet sglang makes an
NCCL communicator for each group and fails for want of a GPU. Groups are made without one.
"""

import functools
import importlib
from typing import Any


def make_groups_without_nccl() -> None:
    """Changes how sglang makes its groups of model-parallel ranks, in this process."""
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    original = state.init_model_parallel_group

    @functools.wraps(original)
    def init_model_parallel_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_pynccl") is None and len(args) < 4:
            kwargs["use_pynccl"] = False
        return original(*args, **kwargs)

    state.init_model_parallel_group = init_model_parallel_group
