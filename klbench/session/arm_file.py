"""A generation arm on disk, so that the death of a runner takes at most the arm in flight.

Written before the scoring begins, removed once the helper's columns are there. The same care as in
columns.py: atomic, no pickles, checked shapes; what cannot be trusted is not continued from, and the arm is
repeated.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from klbench.engine.answers import Generated, Logprobs
from klbench.engine.generation_arm import GenerationArm
from klbench.session.columns import UNREADABLE, read_arrays
from klbench.session.folder import write_atomically

FORMAT = 1

_ARRAYS: dict[str, type[np.generic]] = {
    "prompt_start": np.int64,
    "prompt_ids": np.int64,
    "output_start": np.int64,
    "output_ids": np.int64,
    "nats": np.float64,
    "cached_tokens": np.int64,
    "first_lost": np.bool_,
}
_LATER = ("first_lost",)
"""What files of older versions do not have."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedArm:
    """The arm and what it was measured on: `made_on` as the server's facts, `prompts` the hash of the set."""

    arm: GenerationArm
    prompts_sha256: str
    made_on: dict[str, Any]


def arm_file(runs: Path, run: int, helper: str) -> Path:
    return runs / f"{run}-{helper}-generation.npz"


def save_arm(file: Path, saved: SavedArm) -> None:
    """Writes the arm; a reader sees all or nothing."""
    answers = saved.arm.answers
    note = {
        "format": FORMAT,
        "prompts_sha256": saved.prompts_sha256,
        "made_on": saved.made_on,
        "finish_reasons": [answer.finish_reason for answer in answers],
    }
    cached = [-1 if answer.cached_tokens is None else answer.cached_tokens for answer in answers]
    nats = [answer.output_logprobs.nats for answer in answers if answer.output_logprobs is not None]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        note=np.frombuffer(msgspec.json.encode(note), dtype=np.uint8),
        prompt_start=_starts(saved.arm.prompts),
        prompt_ids=_flat(saved.arm.prompts),
        output_start=_starts([answer.output_ids for answer in answers]),
        output_ids=_flat([answer.output_ids for answer in answers]),
        nats=np.concatenate(nats) if nats else np.zeros(0),
        cached_tokens=np.array(cached, dtype=np.int64),
        first_lost=np.array([answer.first_lost for answer in answers], dtype=np.bool_),
    )
    write_atomically(file, buffer.getvalue())


def load_arm(file: Path) -> SavedArm | None:
    """The arm, or None when there is none or it cannot be trusted."""
    try:
        return _load(file)
    except (*UNREADABLE, msgspec.MsgspecError, TypeError):
        return None


class _Note(msgspec.Struct):
    format: int
    prompts_sha256: str
    made_on: dict[str, Any]
    finish_reasons: list[str]


def _load(file: Path) -> SavedArm:
    arrays = read_arrays(file, ("note", *(_ARRAYS.keys() - _LATER)), _LATER)
    note = msgspec.json.decode(arrays.pop("note").tobytes(), type=_Note)
    if note.format != FORMAT:
        raise ValueError(f"format {note.format}")
    for name, found in arrays.items():
        if found.ndim != 1 or found.dtype != _ARRAYS[name]:
            raise ValueError(f"{name} is {found.dtype} with {found.ndim} dimensions")
    prompts = _parts(arrays["prompt_ids"], arrays["prompt_start"])
    outputs = _parts(arrays["output_ids"], arrays["output_start"])
    nats = _parts(arrays["nats"], arrays["output_start"])
    cached = arrays["cached_tokens"].tolist()
    lost = arrays.get("first_lost", np.zeros(len(prompts), dtype=np.bool_)).tolist()
    if not len(prompts) == len(outputs) == len(cached) == len(lost) == len(note.finish_reasons):
        raise ValueError("its parts speak of different requests")
    if not all(np.isnan(values[:1]).all() for values, gone in zip(nats, lost, strict=True) if gone):
        raise ValueError("a logprob that was lost is there")
    answers = [
        _answer(len(prompt), ids, values, hits, reason, gone)
        for prompt, ids, values, hits, reason, gone in zip(
            prompts, outputs, nats, cached, note.finish_reasons, lost, strict=True
        )
    ]
    arm = GenerationArm([prompt.tolist() for prompt in prompts], answers)
    return SavedArm(arm, note.prompts_sha256, note.made_on)


def _answer(
    prompt_tokens: int,
    ids: npt.NDArray[Any],
    nats: npt.NDArray[Any],
    cached: int,
    reason: str,
    first_lost: bool,
) -> Generated:
    return Generated(
        rid="",
        prompt_tokens=prompt_tokens,
        cached_tokens=None if cached < 0 else cached,
        output_ids=ids.tolist(),
        finish_reason=reason,
        retractions=0,
        dp_rank=None,
        input_logprobs=None,
        output_logprobs=Logprobs(nats, ids, int(np.count_nonzero(~np.isfinite(nats)))),
        first_lost=first_lost,
    )


def _starts(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([len(part) for part in lists], dtype=np.int64)]).astype(np.int64)


def _flat(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.array([token for part in lists for token in part], dtype=np.int64)


def _parts(values: npt.NDArray[Any], starts: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    if not len(starts) or starts[0] != 0 or starts[-1] != len(values) or bool((np.diff(starts) < 0).any()):
        raise ValueError("its requests do not divide its tokens")
    return [values[start:end] for start, end in itertools.pairwise(starts)]
