"""Asks a running server through a control file and waits until every rank has answered.

    control = ControlFile(control_dir, nonce, ranks, "capture")
    answers = await control.ask({"folder": "/scratch/t1"})      {0: {"seq": ..., "ok": true, ...}}

`capture-control.json` holds the request, `capture-ack-<rank>.json` each rank's answer. A request has a number
of its own, so that an answer to an earlier one, or to another klbench, is none. The server's side is
klbench/insitu/control.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench.errors import UndecidedError

_POLL_S = 0.02
_MAX_JSON_BYTES = 1 << 20
_ERROR_CHARACTERS = 2000

# Two processes of klbench that ask one server never use one number.
_sequence = itertools.count(time.time_ns())


def read_small_json(path: Path) -> dict[str, Any] | None:
    """A small JSON object that the server wrote: None while it is not there, empty where it is none."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True)
class Wording:
    """How errors speak of one kind of request."""

    about: str
    """The server does not answer about ..."""
    refused: str
    """The server ..."""
    silent_next: str
    limit_s: float = 120.0
    """A thread of each rank answers, beside forwards that take long where its machine is busy."""


class ControlFile:
    """One kind of request to one server. `ranks` are its model processes; `field` holds what is asked."""

    def __init__(
        self,
        control_dir: Path,
        nonce: str,
        ranks: Collection[int],
        name: str,
        wording: Wording,
        *,
        field: str | None = None,
    ) -> None:
        self._control_dir = control_dir
        self._nonce = nonce
        self._ranks = sorted(ranks)
        self._name = name
        self._wording = wording
        self._field = field or name

    async def ask(self, content: Any, limit_s: float | None = None) -> dict[int, dict[str, Any]]:
        """The answers of all ranks by rank. Raises UndecidedError where one refuses or does not answer."""
        seq = next(_sequence)
        path = self._control_dir / f"{self._name}-control.json"
        draft = path.with_name(f".{path.name}.draft")
        asked = {"seq": seq, "nonce": self._nonce, self._field: content}
        draft.write_text(json.dumps(asked), encoding="utf-8")
        os.replace(draft, path)
        limit_s = self._wording.limit_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        answers = {rank: await self._answer(rank, seq, deadline, limit_s) for rank in self._ranks}
        for rank, answer in answers.items():
            if answer.get("ok") is not True:
                raise UndecidedError(
                    f"rank {rank} of the server {self._wording.refused}",
                    why=str(answer.get("error"))[:_ERROR_CHARACTERS],
                )
        return answers

    async def _answer(self, rank: int, seq: int, deadline: float, limit_s: float) -> dict[str, Any]:
        path = self._control_dir / f"{self._name}-ack-{rank}.json"
        worked: Any = None
        while True:
            answer = read_small_json(path)
            if answer and answer.get("seq") == seq and answer.get("nonce") == self._nonce:
                if "working" not in answer:
                    return answer
                # A large trace takes its time; only a rank that is silent has failed.
                if answer["working"] != worked:
                    worked, deadline = answer["working"], time.monotonic() + limit_s
            if time.monotonic() > deadline:
                raise UndecidedError(
                    f"rank {rank} of the server does not answer about {self._wording.about}",
                    why=f"no acknowledgement within {limit_s:.0f} s in {self._control_dir}",
                    next=self._wording.silent_next,
                )
            await asyncio.sleep(_POLL_S)
