"""`klbench.trace/1` in memory: row digests of every operator of the arms, as columns.

A trace knows no tensors. It holds, for each forward in which a chosen request took part, the 128-bit
digest of each of the request's rows in every operator's inputs and outputs, and of the state (K/V rows,
conv or SSM slots) that the operator read. Both capture back ends make it; localisation knows nothing else.

Tables, each a set of equally long arrays:

    forward   one model forward on one rank
    row       one row of one request in one forward: (arm, request, position) and how it came to be there
    tensor    one argument of one operator call in one forward; its digests lie end to end in `digest`
    read      what a stateful operator read for one row: one digest over positions [low, high)
    slot      one K/V row or recurrent slot as it was written or read, by pool slot; a slot's writer is the
              last write before the read, whichever request wrote it
    head      how many rows shared the call of the LM head that had a row: not all of a forward's reach it
    unseen    a K/V slot that was given to a row of a request that is not recorded: whatever it wrote there

Two rows pair across arms by (request, position); alignment.py proves it. Files: engine/traces.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

SCHEMA = "klbench.trace/1"

STATE_ONLY = "state"
"""Back end of a trace without operators' tensors: only the state between forwards was looked at."""

METADATA = "metadata"
"""Argument of a read that says what the attention backend was told: its digest is 0, or bits of what is wrong
(1: a length, 2: slots of the page table)."""

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
"""[n, 2]: low and high 64 bits."""

ANY_SLOT = -1
"""Pool slot of an unseen write from which on any slot may have been written: there were too many to note."""


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


class Arm(IntEnum):
    WARMING = 0
    GENERATION = 1
    SCORING = 2


class Phase(IntEnum):
    """How a row came into its forward."""

    EXTEND = 0
    """First rows of a request without any prefix."""
    CHUNK = 1
    """A later chunk of a request whose first forward this is not."""
    RESTORED = 2
    """First forward of a request that has a restored prefix."""
    DECODE = 3
    RESUMED = 4
    """Rows computed again after a retraction: prompt and generated tokens in one extend."""


class Direction(IntEnum):
    IN = 0
    OUT = 1


class Slot(IntEnum):
    WRITTEN = 0
    READ = 1


@dataclass(frozen=True, slots=True)
class Operator:
    """One hooked call site. `module` is the path in the model (`model.layers.1.self_attn.attn`) or the head's
    own names (`lm_head`, `logits`, `logprob`); `call` counts repeated calls within one forward."""

    module: str
    class_name: str
    call: int
    order: int
    """Place of the first call in the forward's execution order."""
    container: bool
    """Has hooked children: never an origin while a child explains it."""
    state: str | None
    """"kv" for attention, "conv" or "ssm" for recurrent operators, None where there is no hidden input."""
    window: int | None = None
    """How many earlier positions the state reaches back; None for all of them."""

    @property
    def layer(self) -> int | None:
        """The layer number in the path, None outside the layers."""
        return layer_of(self.module)


def layer_of(module: str) -> int | None:
    """The layer number in a module's path, None outside the layers."""
    for before, part in itertools.pairwise(module.split(".")):
        if before in ("layers", "blocks", "h") and part.isdigit():
            return int(part)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Columns of one capture. Every `*_forward`, `*_operator`, `*_row` is an index into that table."""

    backend: str
    """"dumper", "digest" or "state"."""
    operators: tuple[Operator, ...]
    arguments: tuple[str, ...]
    """Names of operator arguments: "0", "hidden_states", "k" (kv read), ..."""
    dtypes: tuple[str, ...]
    observes_state: bool
    observes_head: bool
    invalid: str | None
    """Why the trace must not be used: an exception in a hook, a file that was cut, a full disk."""

    forward_number: Ints
    """Count of forwards in that process: the order of events on a rank."""
    forward_rank: Ints
    forward_rows: Ints
    """M: all rows of the batch, also those of requests that were not recorded."""
    forward_requests: Ints

    row_forward: Ints
    row_arm: Ints
    row_request: Ints
    row_position: Ints
    row_in_batch: Ints
    row_phase: Ints
    row_token: Ints
    """The token id that the row consumes."""

    tensor_forward: Ints
    tensor_operator: Ints
    tensor_direction: Ints
    tensor_argument: Ints
    tensor_dtype: Ints
    tensor_row_bytes: Ints
    tensor_event: Ints
    """Order of this event (a call's inputs, a return's outputs) within its forward."""
    tensor_rows: Ints
    """How many rows it covers; they are tensor_row[tensor_start : tensor_start + tensor_rows]."""
    tensor_start: Ints
    """Where its digests begin in `digest` and `tensor_row`."""

    tensor_row: Ints
    """[D] the row each digest belongs to; -1 for a digest of a whole tensor without rows."""
    digest: Digests
    """[D, 2]"""

    read_row: Ints
    read_operator: Ints
    read_argument: Ints
    read_low: Ints
    read_high: Ints
    read_digest: Digests

    slot_kind: Ints
    """Slot.WRITTEN or Slot.READ."""
    slot_forward: Ints
    slot_operator: Ints
    slot_argument: Ints
    slot_event: Ints
    slot_request: Ints
    slot_position: Ints
    slot_pool: Ints
    """The pool slot that holds the row."""
    slot_digest: Digests

    head_row: Ints = field(default_factory=_none)
    """A row that reached the LM head. A trace of an earlier version notes none."""
    head_rows: Ints = field(default_factory=_none)
    """M: all rows of the call of the LM head that had it."""

    unseen_number: Ints = field(default_factory=_none)
    """The number of the forward that wrote; it need not be one of the trace's forwards."""
    unseen_rank: Ints = field(default_factory=_none)
    unseen_pool: Ints = field(default_factory=_none)
    """The pool slot, or ANY_SLOT. A trace of an earlier version notes none."""
    unseen_windowed: Ints = field(default_factory=_none)
    """1 where it is a slot of the pool that sliding-window layers have for themselves, else 0."""
