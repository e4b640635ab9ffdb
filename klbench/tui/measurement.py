"""One helper's columns with what the screens derive from them, as arrays; nothing here loops over tokens.

The difference of a token is its decode logprob minus its prefill logprob, in nats. Two logprobs differ when
their bits do. A token whose decode logprob the server lost was not compared: its difference is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.kl import divergent, summarise, token_k3
from klbench.errors import KlbenchError, UndecidedError
from klbench.session.columns import load_columns
from klbench.session.folder import SessionFolder
from klbench.session.state import HelperState
from klbench.storage import read_small

_MAX_TEXTS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Columns of one helper of one run. Requests [N]: `kl_nats` (mean of k3), `max_abs_nats`, `differing`
    tokens, `first_offset` of a difference (-1: none). Tokens [T]: `delta_nats`, `differs`, `k3_nats`."""

    run: int
    columns: HelperColumns
    delta_nats: npt.NDArray[np.float64]
    differs: npt.NDArray[np.bool_]
    k3_nats: npt.NDArray[np.float64]
    kl_nats: npt.NDArray[np.float64]
    max_abs_nats: npt.NDArray[np.float64]
    differing: npt.NDArray[np.int64]
    first_offset: npt.NDArray[np.int64]
    texts: Mapping[int, str] = field(default_factory=dict)

    @property
    def compared(self) -> npt.NDArray[np.int64]:
        """[N] tokens compared of each request; 0 for a dropped one."""
        return self.columns.tokens_compared

    def divergent_first(self) -> npt.NDArray[np.int64]:
        """Requests by divergence, those that differ first, then by number."""
        kl = np.where(np.isnan(self.kl_nats), np.inf, self.kl_nats)
        order: npt.NDArray[np.int64] = np.lexsort(
            (np.arange(len(kl)), -kl, -(self.differing > 0).astype(np.int8))
        ).astype(np.int64)
        return order

    def text_of(self, token_id: int) -> str | None:
        """The token's text as the server gave it (not yet made visible), None while it is not known."""
        return self.texts.get(token_id)


def measure(run: int, columns: HelperColumns, texts: Mapping[int, str] | None = None) -> Measurement:
    """Derive what the screens show from the columns of one helper; the numbers are core.kl's."""
    summary = summarise(columns)
    with np.errstate(all="ignore"):
        delta = columns.decode_nats.astype(np.float64) - columns.prefill_nats
        k3 = token_k3(columns.prefill_nats, columns.decode_nats)
    return Measurement(
        run=run,
        columns=columns,
        delta_nats=delta,
        differs=divergent(columns),
        k3_nats=k3,
        kl_nats=summary.kl_nats,
        max_abs_nats=summary.max_abs_dlogprob,
        differing=summary.divergent_tokens,
        first_offset=summary.first_offset,
        texts=texts or {},
    )


def load_measurement(folder: SessionFolder, run: int, helper: HelperState) -> Measurement:
    """The measurement of a helper that has ended, read from the session's folder. Raises KlbenchError."""
    if helper.columns is None:
        raise UndecidedError(f"{helper.helper} has no token columns", why="it was not compared")
    columns = load_columns(folder.resolve(helper.columns))
    texts: Mapping[int, str] = {}
    if helper.texts is not None:
        try:
            texts = load_texts(folder.resolve(helper.texts))
        except KlbenchError:
            # The numbers are what matters: tokens are then shown by their ids.
            texts = {}
    return measure(run, columns, texts)


def load_texts(path: Path) -> dict[int, str]:
    """Token texts from their JSON file; entries that are no text are left out. Raises UndecidedError."""
    try:
        loaded = json.loads(read_small(path, _MAX_TEXTS_BYTES).decode("utf-8", errors="replace"))
        items = loaded.items() if isinstance(loaded, dict) else ()
        return {
            int(key): value for key, value in items if isinstance(value, str) and key.lstrip("-").isdigit()
        }
    except (OSError, ValueError, RecursionError) as error:
        raise UndecidedError("cannot read the token texts", why=str(error)) from error
