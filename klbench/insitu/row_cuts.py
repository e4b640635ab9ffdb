"""Cuts the rows of a batch out of a call's arguments, so that it can be made again with other rows.

    taken(arguments, 211, index)     the same arguments with the rows in `index` of their 211, always copies

A tensor's rows are its first dimension (dimensions of one in front are passed over) where that is a multiple
of the batch's rows, as heads of a q_norm are; else the only dimension that has exactly the batch's size. A
batch whose number of rows is prime cannot be mistaken for another size.
"""

import copy
import dataclasses
import enum
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

_DEPTH = 4
_STORED_ASIDE = ("FusedSetKVBufferArg",)
"""Where a call stores a copy of its result: called again it stores nothing."""
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class Uncuttable(Exception):
    """What is given to a call cannot be cut by rows: why."""


class Stateful(Uncuttable):
    """It is given the batch or a cache: its result depends on more than these rows."""


class Rows(NamedTuple):
    """Where the rows of a batch are in one tensor: along `axis`, `each` of its indices to a row."""

    axis: int
    each: int


def rows_in(tensor: torch.Tensor, rows: int) -> Optional[Rows]:
    """Where the `rows` rows of the batch are in `tensor`, None where they are not."""
    shape = list(tensor.shape)
    first = 0
    while first < len(shape) - 1 and shape[first] == 1 and rows > 1:
        first += 1
    if shape and shape[first] and shape[first] % rows == 0:
        return Rows(first, shape[first] // rows)
    exact = [axis for axis, size in enumerate(shape) if size == rows]
    return Rows(exact[0], 1) if len(exact) == 1 else None


def select(tensor: torch.Tensor, where: Rows, index: torch.Tensor) -> torch.Tensor:
    """A copy of the rows in `index` (int64), in that order, shaped as the call wants them."""
    shape = list(tensor.shape)
    axis, each = where
    folded = tensor.reshape(*shape[:axis], shape[axis] // each, each, *shape[axis + 1 :])
    chosen = folded.index_select(axis, index)
    return chosen.reshape(*shape[:axis], len(index) * each, *shape[axis + 1 :])


def taken(value: Any, rows: int, index: torch.Tensor) -> Any:
    """`value` with every tensor in it cut to the rows in `index`. Raises Uncuttable."""
    return _mapped(value, "", _DEPTH, lambda name, tensor: _cut(name, tensor, rows, index))


def copied(value: Any, rows: int) -> Any:
    """`value` with every tensor in it copied, proved to have rows. Raises Uncuttable."""
    return _mapped(value, "", _DEPTH, lambda name, tensor: _copy(name, tensor, rows))


def stores_aside(named: Dict[str, Any]) -> bool:
    """Whether the call is told where to store a copy of its result."""
    return any(type(value).__name__ in _STORED_ASIDE for value in named.values())


def tensors_in(value: Any) -> Dict[str, torch.Tensor]:
    """The tensors in a call's output by stable names; what cannot be looked into has none."""
    found: Dict[str, torch.Tensor] = {}

    def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found[name or "0"] = tensor
        return tensor

    # sglang's linear layers return the output and a bias that is left to others, or none.
    if type(value) is tuple and len(value) == 2 and value[1] is None:
        value = value[0]
    try:
        _mapped(value, "", _DEPTH, note)
    except Uncuttable:
        return {}
    return found


def _cut(name: str, tensor: torch.Tensor, rows: int, index: torch.Tensor) -> torch.Tensor:
    where = rows_in(tensor, rows)
    if where is None:
        raise Uncuttable(f"{name or 'an input'} {list(tensor.shape)} has no dimension of {rows} rows")
    return select(tensor, where, index)


def _copy(name: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    if rows_in(tensor, rows) is None:
        raise Uncuttable(f"{name or 'an input'} {list(tensor.shape)} has no dimension of {rows} rows")
    return tensor.detach().clone()


def _mapped(value: Any, name: str, depth: int, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of `value` with `change` applied to the tensors in it."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if isinstance(value, _PLAIN):
        return value
    kind = type(value).__name__
    if kind in _STORED_ASIDE:
        return None
    if "Batch" in kind or "Metadata" in kind or "Buffer" in kind or "Cache" in kind:
        raise Stateful(f"it is given {name or 'an input'}, a {kind}")
    parts = _parts(value) if depth else None
    if parts is None:
        raise Uncuttable(f"{name or 'an input'} is a {kind}")
    children = [
        (key, _mapped(child, f"{name}.{key}" if name else key, depth - 1, change)) for key, child in parts
    ]
    if isinstance(value, dict):
        return {key: child for (_, child), key in zip(children, value, strict=True)}
    if hasattr(value, "_make"):
        return type(value)._make(child for _, child in children)
    if isinstance(value, (tuple, list)):
        return type(value)(child for _, child in children)
    result = copy.copy(value)
    for key, child in children:
        object.__setattr__(result, key, child)
    return result


def _parts(value: Any) -> Optional[List[Tuple[str, Any]]]:
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or [str(place) for place in range(len(value))]
        return list(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None
