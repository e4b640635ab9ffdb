"""What a planter gets, and the proof that what it planted fired.

Proof is `fired-<rank>-<pid>.json` in the control folder (`-2.json` for the second fault of a pair), written
when the fault is armed, at its first firing and then at most once a second while the count grows:

    {"fault": "restore-key", "params": {"layer": 1, "back": 4}, "count": 32,
     "first": {"rid": "klb-a1b2-7g-0", "positions": [296], "rows": 32, "forward": 4}}

`positions` are absolute: the faulty row, or the first and last faulty row of the request. `rows` is how many
rows shared the call, `forward` counts forwards since the fault was armed, from 1. A fault that did not fire
reads count 0 and first null.
"""

import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import torch

from .faults_catalogue import ArmedFault
from .faults_seams import Around, Moment, Moments, Part, Wraps
from .plugin import write_json_atomically

_PROOF_INTERVAL_S = 1.0


class FiredProof:
    """Counts firings and keeps the proof file. A firing costs an addition; a timer does the writing."""

    def __init__(self, armed: ArmedFault, path: Path) -> None:
        self._path = path
        self._head = {"fault": armed.fault.name, "params": dict(armed.parameters)}
        self._first: Optional[Dict[str, Any]] = None
        self._count = 0
        self._timer: Optional[threading.Timer] = None
        self._closed = False
        self._lock = threading.Lock()
        self._write()

    def fired(self, rid: str, positions: List[int], rows: int, forward: int) -> None:
        """Notes one firing; the first one's place is kept."""
        self._count += 1
        if self._first is None:
            self._first = {"rid": rid, "positions": positions, "rows": rows, "forward": forward}
            self._write()
        elif self._timer is None:
            self._timer = threading.Timer(_PROOF_INTERVAL_S, self._write_later)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> Dict[str, Any]:
        """The whole proof, of a fault that is disarmed; its file goes."""
        with self._lock:
            self._closed = True
            self._path.unlink(missing_ok=True)
        return self._content()

    def _content(self) -> Dict[str, Any]:
        return dict(self._head, count=self._count, first=self._first)

    def _write_later(self) -> None:
        # Cleared before the count is read: a firing in between starts the next timer.
        self._timer = None
        with self._lock:
            if not self._closed:
                self._write()

    def _write(self) -> None:
        write_json_atomically(self._path, self._content())


class UnhookedWraps:
    """`Wraps` that let the original run while a hook watches the module: what captured graphs alone do.

    Only modules can be watched: other places raise ValueError.
    """

    def __init__(self, wraps: Wraps) -> None:
        self._wraps = wraps

    def around(self, owner: Any, name: str, around: Around) -> None:
        if not isinstance(owner, torch.nn.Module):
            raise ValueError(f"{type(owner).__name__} is no module that hooks could watch")

        def unless_watched(original: Any, *args: Any, **kwargs: Any) -> Any:
            if owner._forward_hooks or owner._forward_pre_hooks:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self._wraps.around(owner, name, unless_watched)

    def around_method(self, owner: type, name: str, around: Around) -> None:  # noqa: ARG002 - as Wraps
        raise ValueError(f"{owner.__name__} is no module that hooks could watch")

    def before_call(self, module: Any, change: Any) -> None:  # noqa: ARG002 - as Wraps
        raise ValueError(f"what enters {type(module).__name__} cannot hide from hooks")


class Planting:
    """One fault on its way into the model: its parameters, the places, and whom to tell that it fired."""

    def __init__(
        self, armed: ArmedFault, runner: Any, moments: Moments, wraps: Wraps, proof: FiredProof
    ) -> None:
        self.runner = runner
        self.parameters: Mapping[str, int] = armed.parameters
        self.wraps = UnhookedWraps(wraps) if armed.parameters.get("unhooked") else wraps
        self._moments = moments
        self._proof = proof

    @property
    def model(self) -> Any:
        return self.runner.model

    @property
    def moment(self) -> Moment:
        """The forward that runs."""
        return self._moments.now

    def fired(self, part: Part, positions: List[int], rows: Optional[int] = None) -> None:
        """Notes that the fault changed rows of this request; `rows` shared the call (default: batch)."""
        now = self.moment
        self._proof.fired(part.rid, positions, now.rows if rows is None else rows, now.number)

    def fired_in_call(self, rows: int) -> None:
        """Notes that the fault changed every row of a call with `rows` rows."""
        parts = self.moment.parts
        if parts:
            first = parts[0]
            self.fired(first, sorted({first.prefix_len, first.seq_len - 1}), rows)
