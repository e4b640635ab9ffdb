"""One operator called again with other row counts: which bits its judged rows get, and what is kept of it.

A judged row is the first of each batch, followed by its neighbours, so that its place stays the same and only
the number of rows changes. Its result with one row is variant 0; each other result that it ever has is a
variant of its own. An operator that gives other bits than the forward when it is called again with the same
rows is not repeatable, and nothing is said of its invariance.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .digest import digest_rows
from .row_cuts import Rows, rows_in, select, tensors_in

_MASK_64 = (1 << 64) - 1
_VARIANTS_KEPT = 8
_SLICE = 64
"""Rows of a large weight that are kept: those of the first elements that differ."""


class _Judged:
    """The variants of one output argument for one judged row."""

    def __init__(self) -> None:
        self.rows: List[torch.Tensor] = []
        self.by_m: List[int] = []

    def add(self, row: torch.Tensor) -> None:
        for number, known in enumerate(self.rows):
            if torch.equal(known, row):
                self.by_m.append(number)
                return
        self.by_m.append(len(self.rows))
        self.rows.append(row)

    def digests(self) -> List[str]:
        found = []
        for row in self.rows:
            low, high = digest_rows(row, 1)[0].tolist()
            found.append(f"{high & _MASK_64:016x}{low & _MASK_64:016x}")
        return found


class Replayed:
    """What replays found of one operator."""

    def __init__(self, module: str, call: int, class_name: str) -> None:
        self._head = {"module": module, "call": call, "class": class_name}
        self.order = 0
        self.status = "skipped"
        self.reason = ""
        self.tried: List[int] = []
        self.judged: List[int] = []
        self.total = 0
        self.calls = 0
        self.dtypes: Dict[str, str] = {}
        self.arguments: Dict[str, List[_Judged]] = {}

    def leave_out(self, status: str, reason: str) -> None:
        """Says why it was not called again: "stateful", or "skipped" where its rows cannot be cut."""
        self.status, self.reason = status, reason

    def as_dict(self) -> Dict[str, Any]:
        return dict(
            self._head,
            order=self.order,
            status=self.status,
            reason=self.reason,
            total=self.total,
            calls=self.calls,
            tried=self.tried,
            judged=self.judged,
            arguments=[
                {
                    "name": name,
                    "dtype": self.dtypes[name],
                    "variants": [one.by_m for one in judged],
                    "digests": [one.digests() for one in judged],
                }
                for name, judged in self.arguments.items()
            ],
        )

    def different_rows(self) -> Dict[str, Tuple[str, torch.Tensor]]:
        """The variants of every judged row that has several: "argument/judged/variant" to dtype and bytes."""
        return {
            f"{name}/{place}/{variant}": (self.dtypes[name], row)
            for name, judged in self.arguments.items()
            for place, one in enumerate(judged)
            if len(one.rows) > 1
            for variant, row in enumerate(one.rows[:_VARIANTS_KEPT])
        }

    def different_elements(self) -> List[int]:
        """Elements of the first output that differ between variants, at most a few."""
        for name, judged in self.arguments.items():
            width = _element_size(self.dtypes[name])
            for one in judged:
                for row in one.rows[1:]:
                    differs = (row != one.rows[0]).reshape(-1, width).any(dim=1)
                    return [int(place) for place in torch.nonzero(differs)[:_SLICE, 0]]
        return []


def _element_size(dtype: str) -> int:
    return int(torch.empty(0, dtype=getattr(torch, dtype)).element_size())


def replay_operator(
    operator: Replayed,
    again: Callable[[torch.Tensor], Any],
    output: Any,
    *,
    total: int,
    judged: List[int],
    tried: List[int],
    device: Any,
) -> None:
    """Fills `operator`. `again(index)` calls it with those of its `total` rows; `output` is the forward's.

    Never raises; the forward's output is as it was.
    """
    operator.total, operator.judged = total, judged
    outputs = {name: tensor for name, tensor in tensors_in(output).items() if rows_in(tensor, total)}
    if not outputs:
        operator.leave_out("skipped", "what it puts out has no rows")
        return
    places = {name: rows_in(tensor, total) for name, tensor in outputs.items()}
    before = {name: tensor.detach().clone() for name, tensor in outputs.items()}
    operator.dtypes = {name: str(tensor.dtype).replace("torch.", "") for name, tensor in outputs.items()}
    try:
        operator.calls += 1
        same = tensors_in(again(torch.arange(total, device=device)))
        if not all(name in same and _same_bits(same[name], tensor) for name, tensor in before.items()):
            operator.status = "not_repeatable"
            operator.reason = "called again with the same rows it gives other bits than in the forward"
            return
        _try_all(operator, again, places, tried, device)
    except Exception as error:
        operator.status, operator.reason = "error", f"{type(error).__name__}: {error}"[:500]
    finally:
        for name, tensor in outputs.items():
            if not _same_bits(tensor, before[name]):
                tensor.copy_(before[name])


def _try_all(
    operator: Replayed,
    again: Callable[[torch.Tensor], Any],
    places: Dict[str, Optional[Rows]],
    tried: List[int],
    device: Any,
) -> None:
    found = {name: [_Judged() for _ in operator.judged] for name in places}
    first = torch.zeros(1, dtype=torch.int64, device=device)
    for m in tried:
        results: List[Dict[str, torch.Tensor]] = []
        try:
            for row in operator.judged:
                index = (row + torch.arange(m, device=device)) % operator.total
                operator.calls += 1
                results.append(_first_rows(tensors_in(again(index)), places, m, first))
        except Exception as error:
            if len(operator.tried) < 2:
                raise
            # What was found with fewer rows stands; the largest M is as far as it went.
            operator.reason = f"with {m} rows: {type(error).__name__}: {error}"[:500]
            break
        for place, result in enumerate(results):
            for name, bits in result.items():
                found[name][place].add(bits)
        operator.tried.append(m)
    operator.arguments = found
    changed = any(len(one.rows) > 1 for judged in found.values() for one in judged)
    operator.status = "not_invariant" if changed else "invariant"


def _first_rows(
    output: Dict[str, torch.Tensor], places: Dict[str, Optional[Rows]], m: int, first: torch.Tensor
) -> Dict[str, torch.Tensor]:
    """The bytes of the first row of each output."""
    rows = {}
    for name, where in places.items():
        assert where is not None
        tensor = output[name]
        if tensor.shape[where.axis] != m * where.each:
            raise ValueError(f"{name} has {list(tensor.shape)} for {m} rows")
        rows[name] = _bits(select(tensor, where, first)).cpu()
    return rows


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(_bits(a), _bits(b)))


class Kept:
    """Inputs and weights of operators, for a script that needs no server; at most `limit_bytes` of them.

    `about` says by operator what the module is: plain attributes (eps, ...), which weights were cut to the
    rows of `elements`, and what was too large.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.tensors: Dict[str, torch.Tensor] = {}
        self.about: Dict[str, Dict[str, Any]] = {}
        self._bytes = 0

    def add(self, number: int, inputs: Dict[str, torch.Tensor], module: Any, operator: Replayed) -> None:
        """Keeps what fits of one operator's inputs (all rows) and weights."""
        about: Dict[str, Any] = {"attributes": _plain_attributes(module), "cut": [], "left_out": []}
        self.about[str(number)] = about
        for name, tensor in inputs.items():
            if not self._keep(f"{number}/input/{name.split('.', 1)[-1]}", tensor):
                about["left_out"].append(f"input {name}")
        elements = operator.different_elements()
        for name, parameter in module.named_parameters(recurse=False):
            if self._keep(f"{number}/weight/{name}", parameter):
                continue
            rows = [place for place in elements if place < parameter.shape[0]]
            if parameter.dim() == 2 and rows:
                index = torch.tensor(rows, device=parameter.device)
                if self._keep(f"{number}/weight/{name}", parameter.index_select(0, index)):
                    self.tensors[f"{number}/elements"] = index.cpu()
                    about["cut"].append(name)
                    continue
            about["left_out"].append(f"weight {name}")

    def _keep(self, name: str, tensor: torch.Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        if self._bytes + size > self.limit_bytes:
            return False
        self._bytes += size
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return True


def _plain_attributes(module: Any) -> Dict[str, Any]:
    """The module's numbers and short words, as they stand."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, (int, float, str)) and len(str(value)) < 80
    }
