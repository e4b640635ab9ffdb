"""Replays: calls the operators of one forward again, alone, on their own rows, with 1, 2, 3, ... rows.

An operator is batch-invariant when the bits of a row do not depend on how many rows share its call. Asked for
in `replay-control.json` in the control folder, which a thread of each rank reads and answers in
`replay-ack-<rank>.json`; done inside the first forward of the carrier, a request that is sent afterwards, so
that all ranks replay the same calls in the same order:

    {"seq": 3, "nonce": "a1b2", "replay": {"folder": "/scratch/r1", "carrier": "klb-a1b2-9s-0",
      "modules": null, "first": 0, "count": 64, "rows": [1, 2, 3, 4, 8, 16, 32, 64], "wrap": false,
      "position": null, "keep_bytes": 0}}

`modules` names call sites (null: every one); of those the ones from `first` on, `count` of them, in execution
order. `rows` are the M to try, beside all N rows of the forward; `wrap` repeats rows for an M above N. A
batch of M rows begins with the judged row: the one at `position`, else the first, the middle, the last.

Each rank first writes `ready-<rank>.json` there (the same nonce: proof that both sides see one folder), then
`replay-<rank>.json` (operators, the variants of each judged row by M), the different rows as
bytes to `rows-<rank>.safetensors`, and with `keep_bytes` inputs and weights to `kept-<rank>.safetensors`.
What goes wrong marks the operator or the result and never reaches the server: arguments are copies, and the
forward's own outputs are put back where a call wrote over them.
"""

import threading
from pathlib import Path
from typing import Any, Dict, List, Optional

from . import control
from .plugin import write_json_atomically
from .replay_forward import Asked, CarriedForward, told

CONTROL = "replay-control.json"


def install(context: Any) -> None:
    """Prepares replays in each process that will hold a model."""
    if context.may_hold_a_model:
        context.when_model_is_loaded(_start)


def _start(model_runner: Any, context: Any) -> None:
    replays = Replays(model_runner, context.control_dir, context.nonce, context.rank)
    replays.wrap_forward()
    threading.Thread(target=replays.watch, name="klbench-replay", daemon=True).start()
    context.presence.add_hooks("replay.control")


class Replays:
    """The replays of one rank. The forward thread does them; the watcher thread takes requests."""

    def __init__(self, model_runner: Any, control_dir: Path, nonce: str, rank: int) -> None:
        self._runner = model_runner
        self._control_dir = control_dir
        self._nonce = nonce
        self._rank = rank
        self._asked: Optional[Asked] = None

    def wrap_forward(self) -> None:
        original = self._runner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            asked = self._asked
            if asked is None:
                return original(*args, **kwargs)
            carried = self._begin(asked, args[0] if args else kwargs.get("forward_batch"))
            if carried is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._end(carried)

        self._runner.forward = forward

    def _begin(self, asked: Asked, batch: Any) -> Optional[CarriedForward]:
        try:
            judged = judged_rows(asked, batch)
            if judged is None:
                return None
            self._asked = None
            carried = CarriedForward(asked, self._runner.model, batch, judged)
            carried.install()
        except Exception as error:
            self._asked = None
            self._write(asked, None, told(error))
            return None
        return carried

    def _end(self, carried: CarriedForward) -> None:
        try:
            carried.remove()
            self._write(carried.asked, carried, carried.error)
        except Exception as error:
            self._write(carried.asked, None, told(error))

    def _write(self, asked: Asked, carried: Optional[CarriedForward], error: Optional[str]) -> None:
        content: Dict[str, Any] = {"nonce": self._nonce, "rank": self._rank, "carrier": asked.carrier}
        content.update(error=error, rows=0, total=0, operators=[])
        try:
            if carried is not None:
                content.update(carried.as_dict())
                carried.save(asked.folder, self._rank)
            write_json_atomically(asked.folder / f"replay-{self._rank}.json", content)
        except Exception as failure:
            content.update(error=told(failure), operators=[])
            try:
                write_json_atomically(asked.folder / f"replay-{self._rank}.json", content)
            except OSError:
                return

    # The watcher thread.

    def watch(self) -> None:
        """Answers each control file, until the process ends."""
        # One that is no request is not answered, and klbench says so.
        control.watch(self._control_dir / CONTROL, self._answer, lambda _error: None)

    def _answer(self, content: Any) -> None:
        if not isinstance(content, dict) or content.get("nonce") != self._nonce:
            return
        answer: Dict[str, Any] = {"seq": content.get("seq"), "nonce": self._nonce, "rank": self._rank}
        answer.update(ok=True, error=None)
        try:
            asked = None
            if content.get("replay") is not None:
                asked = Asked(content["replay"])
                asked.check_folder()
                write_json_atomically(asked.folder / f"ready-{self._rank}.json", answer)
            self._asked = asked
        except Exception as error:
            answer.update(ok=False, error=f"{type(error).__name__}: {error}")
        write_json_atomically(self._control_dir / f"replay-ack-{self._rank}.json", answer)


def judged_rows(asked: Asked, batch: Any) -> Optional[List[int]]:
    """The rows to judge in this forward; None where it is not the one that was asked for."""
    rids = batch.rids or []
    if asked.carrier not in rids or batch.extend_seq_lens_cpu is None:
        return None
    place = rids.index(asked.carrier)
    first = sum(int(rows) for rows in batch.extend_seq_lens_cpu[:place])
    rows = int(batch.extend_seq_lens_cpu[place])
    if asked.position is None:
        return sorted({first, first + rows // 2, first + rows - 1})
    within = asked.position - int(batch.extend_prefix_lens_cpu[place])
    return [first + within] if 0 <= within < rows else None
