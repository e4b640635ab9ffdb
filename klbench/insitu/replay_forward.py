"""The forward that carries replays: hooks on its modules and head, and each operator's turn.

Only innermost calls are replayed, in the order in which they return. Stateful operators, and those whose
inputs cannot be cut by rows, are listed with the reason.
"""

import json
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from safetensors.torch import save_file

from .capture import describe_modules
from .module_sites import Site, sites_of
from .private import check_private
from .replay_operator import Kept, Replayed, replay_operator
from .row_cuts import Stateful, Uncuttable, copied, stores_aside, taken, tensors_in

_PROCESSOR = "LogitsProcessor"
_STATES = {"kv": "the K/V of earlier rows", "conv": "a convolution state", "ssm": "a recurrent state"}


class Asked:
    """One request for replays."""

    def __init__(self, asked: Dict[str, Any]) -> None:
        self.folder = Path(str(asked["folder"]))
        self.carrier = str(asked["carrier"])
        modules = asked.get("modules")
        self.modules = None if modules is None else frozenset(str(path) for path in modules)
        self.first, self.count = int(asked["first"]), int(asked["count"])
        self.rows = sorted({int(rows) for rows in asked["rows"]} - {0})
        self.wrap = bool(asked.get("wrap"))
        position = asked.get("position")
        self.position: Optional[int] = None if position is None else int(position)
        self.keep_bytes = int(asked.get("keep_bytes") or 0)
        if not self.rows or self.rows[0] < 1:
            raise ValueError("a replay needs row counts of 1 or more")

    def check_folder(self) -> None:
        check_private(self.folder)


def told(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:]


class _Call:
    """A call in progress: its inputs as they were, copied, or why they cannot be cut."""

    def __init__(self, path: str, site: Optional[Site] = None, number: int = 0) -> None:
        self.site = site
        self.path = path
        self.number = number
        self.leaf = True
        self.inputs: Optional[Tuple[Dict[str, Any], Dict[str, Any]]] = None
        self.passed: Dict[str, Any] = {}
        """Keyword arguments that are handed on as they are."""
        self.stateful = False
        self.reason = ""


class CarriedForward:
    """The forward that carries replays: hooks on every module and on the head's function."""

    def __init__(self, asked: Asked, model: Any, batch: Any, judged: List[int]) -> None:
        self.asked = asked
        self.error: Optional[str] = None
        self._model = model
        self._batch = batch
        self._judged = judged
        self._rows = int(batch.input_ids.shape[0])
        self._about = describe_modules(model)
        self._handles: List[Any] = []
        self._heads: List[Any] = []
        self._stack: List[_Call] = []
        self._paths: List[str] = []
        self._calls: Dict[str, int] = {}
        self._busy = False
        self._leaves = 0
        self._called = 0
        self._operators: List[Replayed] = []
        self._kept = Kept(asked.keep_bytes)

    def install(self) -> None:
        for site in sites_of(self._model):
            if site.class_name == _PROCESSOR:
                self._wrap_head(site.module)
                continue
            self._handles += [
                site.module.register_forward_pre_hook(self._pre_hook(site), with_kwargs=True),
                site.module.register_forward_hook(self._post_hook(site), with_kwargs=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for processor, name, before in self._heads:
            if before is None:
                delattr(processor, name)
            else:
                setattr(processor, name, before)
        self._handles, self._heads = [], []
        if not self._called and self.error is None:
            self.error = "no module was called in the carrier's forward: it replays a CUDA graph"

    def as_dict(self) -> Dict[str, Any]:
        return {
            "rows": self._rows,
            "total": self._leaves,
            "operators": [operator.as_dict() for operator in self._operators],
        }

    def save(self, folder: Path, rank: int) -> None:
        """Writes the different rows and what was kept; the file of results comes last."""
        rows, dtypes = {}, {}
        for number, operator in enumerate(self._operators):
            for name, (dtype, row) in operator.different_rows().items():
                rows[f"{number}/{name}"], dtypes[f"{number}/{name}"] = row, dtype
        save_file(rows, str(folder / f"rows-{rank}.safetensors"), metadata={"dtypes": json.dumps(dtypes)})
        if self.asked.keep_bytes:
            about = {"about": json.dumps(self._kept.about)}
            save_file(self._kept.tensors, str(folder / f"kept-{rank}.safetensors"), metadata=about)

    # Hooks of modules.

    def _pre_hook(self, site: Site) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            if not self._busy:
                try:
                    self._enter(site, args, kwargs)
                except Exception as error:
                    self.error = self.error or told(error)

        return hook

    def _post_hook(self, site: Site) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
            if not self._busy:
                try:
                    self._leave(site, output)
                except Exception as error:
                    self.error = self.error or told(error)

        return hook

    def _enter(self, site: Site, args: Any, kwargs: Any) -> None:
        if not self._called:
            # Rows may have been padded since the forward began.
            self._rows = int(self._batch.input_ids.shape[0])
        self._called += 1
        path = site.path(self._paths)
        call = _Call(path, site, self._calls.get(path, 0))
        self._calls[path] = call.number + 1
        if self._stack:
            self._stack[-1].leaf = False
        self._stack.append(call)
        self._paths.append(path)
        state = self._about.get(path, {}).get("state")
        if state is not None:
            call.stateful, call.reason = True, f"it reads {_STATES.get(state, state)}"
        elif self._wanted(path):
            named = {site.argument(place): value for place, value in enumerate(args)}
            kwargs = dict(kwargs)
            if _is_linear(site.module):
                # It asks the batch for nothing but its mode.
                batches = [name for name, value in kwargs.items() if type(value).__name__ == "ForwardBatch"]
                call.passed = {name: kwargs.pop(name) for name in batches}
            try:
                call.inputs = (copied(named, self._rows), copied(kwargs, self._rows))
                if not tensors_in(call.inputs):
                    raise Uncuttable("no tensor is given to it")
                if stores_aside({**named, **kwargs}):
                    call.reason = "called without storing a copy of its result, which is a kernel of its own"
            except Stateful as error:
                call.stateful, call.reason = True, str(error)
            except Uncuttable as error:
                call.inputs, call.reason = None, str(error)

    def _wanted(self, path: str) -> bool:
        return self.asked.modules is None or path in self.asked.modules

    def _leave(self, site: Site, output: Any) -> None:
        while self._stack and self._stack[-1].site is not site:
            self._stack.pop()
            self._paths.pop()
        if not self._stack:
            return
        call = self._stack.pop()
        self._paths.pop()
        if not call.leaf or not self._wanted(call.path):
            return
        inputs = call.inputs
        again: Optional[Callable[[torch.Tensor], Any]] = None
        if inputs is not None:
            positional, named = inputs
            module, rows, passed = site.module, self._rows, call.passed

            def again(index: torch.Tensor) -> Any:
                cut = taken(positional, rows, index).values()
                return module(*cut, **taken(named, rows, index), **passed)

        operator = self._replay(
            Replayed(call.path, call.number, site.class_name), again, call, output, self._rows
        )
        if operator is not None and inputs is not None and self._kept.limit_bytes:
            self._kept.add(len(self._operators) - 1, tensors_in(inputs), site.module, operator)

    def _replay(
        self,
        operator: Replayed,
        again: Optional[Callable[[torch.Tensor], Any]],
        call: _Call,
        output: Any,
        rows: int,
    ) -> Optional[Replayed]:
        """Replays the operator if its turn has come."""
        operator.order = self._leaves
        self._leaves += 1
        if not self.asked.first <= operator.order < self.asked.first + self.asked.count:
            return None
        self._operators.append(operator)
        if again is None:
            operator.leave_out("stateful" if call.stateful else "skipped", call.reason)
            return operator
        tried = [m for m in self.asked.rows if self.asked.wrap or m <= rows]
        self._busy = True
        try:
            replay_operator(
                operator,
                again,
                output,
                total=rows,
                judged=sorted({min(row, rows - 1) for row in self._judged}),
                tried=sorted({*tried, rows}),
                device=self._batch.input_ids.device,
            )
        finally:
            self._busy = False
        operator.reason = "; ".join(filter(None, (operator.reason, call.reason)))
        return operator

    # The head: functions of the logits processor, not modules.

    def _wrap_head(self, processor: Any) -> None:
        for name, around in (("_compute_lm_head", self._lm_head), ("_get_logits", self._logits)):
            original = getattr(processor, name, None)
            if callable(original):
                self._heads.append((processor, name, vars(processor).get(name)))
                setattr(processor, name, self._wrapper(original, around))

    def _wrapper(self, original: Any, around: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self._busy:
                try:
                    around(original, args, kwargs, result)
                except Exception as error:
                    self.error = self.error or told(error)
            return result

        return wrapper

    def _lm_head(self, original: Any, args: Any, kwargs: Any, result: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        lm_head = args[1] if len(args) > 1 else kwargs.get("lm_head")
        rest = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "out")}

        def again(index: torch.Tensor) -> Any:
            return original(hidden.index_select(0, index), *args[1:], **rest)

        if self._head_replayed("lm_head", type(lm_head).__name__, again, hidden, result):
            self._kept.add(len(self._operators) - 1, {"hidden_states": hidden}, lm_head, self._operators[-1])

    def _logits(self, _: Any, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ARG002
        if not isinstance(result, torch.Tensor):
            return
        if self._wanted("lm_head") and not self._calls.get("lm_head"):
            self._calls["lm_head"] = 1
            call = _Call("lm_head")
            call.reason = "this version has no function of its own for it"
            self._replay(Replayed("lm_head", 0, ""), None, call, result, int(result.shape[0]))
        logprobs = torch.nn.functional.log_softmax(result, dim=-1)

        def again(index: torch.Tensor) -> Any:
            return torch.nn.functional.log_softmax(result.index_select(0, index), dim=-1)

        self._head_replayed("logprob", "log_softmax", again, result, logprobs)

    def _head_replayed(
        self, name: str, class_name: str, again: Any, given: Any, result: Any
    ) -> Optional[Replayed]:
        """Replays the head's function at its first call in the forward; None where it did not."""
        if not self._wanted(name) or self._calls.get(name):
            return None
        self._calls[name] = 1
        call = _Call(name)
        rows = int(given.shape[0])
        if rows == 1 and self._rows > 1:
            again, call.reason = None, "one row of this forward reaches it"
        return self._replay(Replayed(name, 0, class_name), again, call, result, rows)


def _is_linear(module: Any) -> bool:
    return any(kind.__name__ == "LinearBase" for kind in type(module).__mro__)
