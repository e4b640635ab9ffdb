"""Where a model's modules stand and what their arguments are called: the same in every phase and arm.

An argument's name is the parameter that it binds to, passed by position or by keyword; a tensor inside a
tuple, list, dict or dataclass adds its place, `residual`, `0.1`. A module that layers share has the path of
the layer that calls it. What carries no tensor is ignored; a container that is not known here is noted as not
observed, once.
"""

import dataclasses
import inspect
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

_DEPTH = 4
_PLAIN = (int, float, bool, str, bytes, type(None), torch.nn.Module, torch.dtype, torch.device)
# Descriptions of the batch: their tensors are what every module sees, not what it is given to work on.
# FusedSetKVBufferArg tells a fused kernel into which slots of the pool it writes K and V as well.
# The states of a Mamba mixer are those of all slots of its pool.
_BATCHES = (
    *("ForwardBatch", "LogitsMetadata", "SamplingBatchInfo", "FusedSetKVBufferArg"),
    *("Mamba2Metadata", "MambaPool.State", "MambaPool.SpeculativeState"),
)

_RESULT = "output"


class Site:
    """One module: its paths, and the names of its arguments.

    `ignored` are arguments that are no input: a buffer that a Mamba mixer puts its result into, and constants
    of the model. `mixes`: a Mamba mixer.
    """

    def __init__(self, module: torch.nn.Module, paths: List[str]) -> None:
        self.module = module
        self.paths = paths
        self.class_name = type(module).__name__
        self.mixes = any("MambaMixer" in kind.__name__ for kind in type(module).__mro__)
        self.ignored: Tuple[str, ...] = (_RESULT, "mup_vector") if self.mixes else ()
        self._positional: Tuple[str, ...] = ()
        self._rest: Optional[str] = None
        parameters = _parameters(module.forward)
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            # sglang's operators choose one of several forwards with the same parameters.
            inner = getattr(module, "_forward_method", None) or getattr(module, "forward_native", None)
            parameters = _parameters(inner) if callable(inner) else parameters
        self._positional = tuple(
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )
        self._rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)

    def argument(self, place: int) -> str:
        """The name of the argument at `place` among those passed by position."""
        if place < len(self._positional):
            return self._positional[place]
        return f"{self._rest or 'args'}.{place - len(self._positional)}"

    def result(self, args: Any, kwargs: Any, output: Any) -> Any:
        """What a call put out. A mixer also hands over states of its chunks, which decode has none of."""
        if not self.mixes:
            return output
        given = {self.argument(place): value for place, value in enumerate(args)}
        given.update(kwargs)
        if isinstance(given.get(_RESULT), torch.Tensor):
            return given[_RESULT]
        return output[0] if isinstance(output, tuple) and output else output

    def path(self, stack: List[str]) -> str:
        """The path under which the innermost running module has it."""
        if len(self.paths) > 1:
            for running in reversed(stack):
                for path in self.paths:
                    if path.startswith(running + "."):
                        return path
        return self.paths[0]


def _parameters(function: Any) -> List[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def sites_of(model: torch.nn.Module) -> List[Site]:
    """A site for each module below the root, outer ones first."""
    paths: Dict[int, List[str]] = {}
    modules: Dict[int, torch.nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            paths.setdefault(id(module), []).append(path)
            modules[id(module)] = module
    return [Site(modules[key], found) for key, found in paths.items()]


def each_tensor(
    name: str, value: Any, found: Callable[[str, torch.Tensor], None], unknown: Callable[[str], None]
) -> None:
    """Calls `found` for each tensor in `value` by its stable name; `unknown` for what may hide one."""
    if isinstance(value, torch.Tensor):
        found(name, value)
    elif not isinstance(value, _PLAIN) and not _is_batch(value):
        _walk(name, value, found, unknown, _DEPTH)


def _walk(
    name: str,
    value: Any,
    found: Callable[[str, torch.Tensor], None],
    unknown: Callable[[str], None],
    depth: int,
) -> None:
    if isinstance(value, torch.Tensor):
        found(name, value)
        return
    if isinstance(value, _PLAIN) or _is_batch(value) or callable(value):
        return
    inner = _children(value) if depth else None
    if inner is None:
        unknown(f"{name}: {type(value).__name__}")
        return
    for key, child in inner:
        _walk(".".join(filter(None, (name, key))), child, found, unknown, depth - 1)


def _is_batch(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ in _BATCHES or kind.__qualname__ in _BATCHES


def _children(value: Any) -> Optional[List[Tuple[str, Any]]]:
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or [str(i) for i in range(len(value))]
        return list(zip(names, value, strict=False))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    kind = type(value).__name__
    # sglang's sums that are still to be reduced over the ranks: this rank's part stands for itself.
    if kind == "UnreducedOutput":
        return [("", value.partial)]
    if kind == "OwedOutput":
        return [("", value.contribution.value)]
    if kind == "PPProxyTensors":
        return [(str(key), child) for key, child in value.tensors.items()]
    return None
