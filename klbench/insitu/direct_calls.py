"""Operators with state that a model calls as `module.forward(...)`, past the hooks of the module.

sglang's Mamba back end calls its mixers so, and some models their attention: only the projections inside
would be seen, and what reads the state would look like a gap between them. While a capture has its hooks,
such a call goes through the module.

    model.layers.0.mixer.in_proj  ->  [convolution, scan]  ->  model.layers.0.mixer.norm
    model.layers.0.mixer              all of it, with the state before and after
"""

import functools
import inspect
import re
from typing import Any, Collection, Dict, List, Optional

import torch

from .module_sites import Site


class DirectCall:
    """Lets one module's hooks see calls of its `forward`, until `remove`; its result is untouched."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._original = module.forward
        self._of_instance = "forward" in vars(module)
        self._through_hooks = False
        self._handle = module.register_forward_pre_hook(self._called, prepend=True)
        module.forward = self._forward(self._original)

    def _called(self, _module: Any, _args: Any) -> None:
        self._through_hooks = True

    def _forward(self, original: Any) -> Any:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._through_hooks:
                return self._module(*args, **kwargs)
            self._through_hooks = False
            return original(*args, **kwargs)

        return forward

    def remove(self) -> None:
        self._handle.remove()
        if self._of_instance:
            self._module.forward = self._original
        else:
            del self._module.forward


def is_called_directly(model: torch.nn.Module, site: Site) -> bool:
    """Whether the site's `forward` is called past its hooks: a mixer's by its back end, others where the code
    of the model or of the module around says so.

    Nothing else is wrapped: a planted fault wraps `forward`, too, and either must find its own when it goes.
    """
    if site.mixes:
        return True
    parent, _, name = site.paths[0].rpartition(".")
    around = type(model.get_submodule(parent))
    call = re.compile(rf"{re.escape(name)}\.forward\(")
    return any(call.search(_source_of(kind)) for kind in {type(model), around})


def _source_of(kind: type) -> str:
    """The file that the class is written in, empty where it cannot be read."""
    try:
        return inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return ""


def never_called(describe: Dict[str, Any], called: Collection[str]) -> List[str]:
    """Modules with state that were not called though modules beside or inside them were.

    `describe` is as capture.describe_modules says. One that reads its state through a module inside, or that
    has a twin beside it that was called (attention has one for prefill and one for decode in some models), is
    not missed.
    """
    seen = set(called)
    above = {path[:end] for path in seen for end, sign in enumerate(path) if sign == "."}
    twins = {(_parent(path), describe.get(path, {}).get("state")) for path in seen}
    stateful = [path for path, about in describe.items() if about.get("state")]
    holders = {path[:end] for path in stateful for end, sign in enumerate(path) if sign == "."}
    return [
        path
        for path in stateful
        if path not in seen
        and path not in holders
        and (path in above or _parent(path) in above)
        and (_parent(path), describe[path]["state"]) not in twins
    ]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def layer_numbers(model: torch.nn.Module) -> Dict[str, Optional[int]]:
    """The layer of each module by path: its `layer_id` or `layer_idx`, else that of the nearest around it."""
    found: Dict[str, Optional[int]] = {}
    for path, module in model.named_modules():
        own = [getattr(module, name, None) for name in ("layer_id", "layer_idx")]
        numbers = [number for number in own if isinstance(number, int) and not isinstance(number, bool)]
        around = found.get(_parent(path)) if path else None
        found[path] = numbers[0] if numbers else around
    return found
