"""Which cores each rank of a CPU server gets: sglang refuses more ranks than NUMA nodes, unless told."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"

_SIZES = (
    ("--tp-size", "--tensor-parallel-size", "--tp"),
    ("--pp-size", "--pipeline-parallel-size"),
    ("--dp-size", "--data-parallel-size"),
)


def rank_cores(
    users: Mapping[str, str | None], environment: Mapping[str, str], cores: Sequence[int] | None = None
) -> dict[str, str]:
    """The variable that shares `cores` (default: this process's) out among the ranks that `users` ask for.

    Empty for one rank, and where the user has set it. Ranks beyond the cores share them.
    """
    sizes = [next((users[name] for name in names if users.get(name)), None) for names in _SIZES]
    ranks = math.prod(int(size) for size in sizes if size is not None and size.isdigit() and int(size))
    if ranks < 2 or VARIABLE in environment:
        return {}
    mine = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    each = max(len(mine) // ranks, 1)
    parts = [[mine[(rank * each + place) % len(mine)] for place in range(each)] for rank in range(ranks)]
    return {VARIABLE: "|".join(",".join(map(str, part)) for part in parts)}
