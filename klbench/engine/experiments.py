"""The passes that experiments make on a server, and the proof that two passes had the same batches.

    passes = Passes(server, RequestIds(server.nonce), max_new_tokens=128)
    base = await passes.helper("match", prompts)
    again = await passes.helper("match", prompts)
    composed_equally(base, again)

Batches are proved by the plugin's log of compositions; on a server without it they count as unequal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.passes import EqualRows
from klbench.engine.arms import Widen, run_arms
from klbench.engine.capture_control import RequestIds
from klbench.engine.captured_work import differs
from klbench.engine.compositions import Composition, read_compositions
from klbench.engine.progress import ArmObserver
from klbench.engine.server import Server

WIDE_ROWS = 128
"""So many rows follow the restored prefix in a wide extend: more than any decode batch of a usual run."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One pass of a helper: its columns, and the shapes of its forwards in order (None: not observed)."""

    columns: HelperColumns
    shapes: tuple[Any, ...] | None


def composed_equally(one: Pass, other: Pass) -> bool:
    """Whether the forwards of both passes held the same rows of the same requests in the same order."""
    return one.shapes is not None and one.shapes == other.shapes


def most_alike(passes: Sequence[Pass]) -> Pass:
    """The first pass of the most that are composed equally: a busy machine makes other batches at times."""
    return max(passes, key=lambda one: sum(composed_equally(one, other) for other in passes))


class Passes:
    """Makes passes on one server."""

    def __init__(
        self,
        server: Server,
        ids: RequestIds,
        *,
        max_new_tokens: int,
        observe: ArmObserver | None = None,
    ) -> None:
        self._server = server
        self._ids = ids
        self._max_new_tokens = max_new_tokens
        self._observe = observe

    async def helper(
        self, helper: HelperName, prompts: Sequence[Sequence[int]], *, widen: Widen | None = None
    ) -> Pass:
        """One execution of the helper's arms."""
        rids = self._ids.next_pass()
        number = self._ids.latest_pass
        columns = await run_arms(
            self._server.client,
            helper,
            prompts,
            max_new_tokens=self._max_new_tokens,
            widen=widen,
            rids=rids,
            observe=self._observe,
            options=self._server.arm_options(),
        )
        return Pass(columns, self.shapes(number))

    def of_measured(self, columns: HelperColumns, number: int) -> Pass:
        """A pass that a run made on this very server."""
        return Pass(columns, self.shapes(number))

    def shapes(self, number: int) -> tuple[Any, ...] | None:
        """The shapes of a pass's forwards in order; None where they were not observed."""
        forwards = self._forwards(number)
        return tuple(forward.shape for forward in forwards) if forwards else None

    def _forwards(self, number: int) -> list[Composition]:
        folder, nonce = self._server.control_dir, self._server.nonce
        if folder is None or nonce is None:
            return []
        log = folder / "forwards-0.jsonl"
        return read_compositions(log, nonce, [number]) if log.exists() else []

    async def equal_rows(self, columns: HelperColumns) -> list[EqualRows]:
        """One token of each request as decode and as a one-token extend on its cached prefix.

        The prompts of `columns` are generated from cold; then all are sent again up to that token,
        so that both forwards have one row a request. It is the first divergent token that decode
        computed, else the first.
        """
        client, options = self._server.client, self._server.arm_options()
        starts = columns.prompt_start
        prompts = [columns.prompt_ids[starts[i] : starts[i + 1]].tolist() for i in range(columns.requests)]
        first = [_first_decode_offset(columns, request) for request in range(columns.requests)]
        rids = self._ids.next_pass()
        number = self._ids.latest_pass
        await client.flush()
        answers = await client.generate(
            prompts,
            max_new_tokens=max(first) + 2,
            return_logprob=True,
            rids=[rids("generation", index) for index in range(len(prompts))],
            routed_dp_rank=options.routed_dp_rank,
        )
        # What is compared is no first token.
        generated = [answer.with_place_of_lost() for answer in answers]
        kept = [index for index, answer in enumerate(generated) if len(answer.output_ids) > first[index]]
        cut = [prompts[index] + generated[index].output_ids[: first[index]] for index in kept]
        extended = await client.generate(
            cut,
            max_new_tokens=1,
            return_logprob=True,
            rids=[rids("scoring", index) for index in kept],
            routed_dp_rank=options.routed_dp_rank,
        )
        forwards = self._forwards(number)
        pairs = []
        for index, sequence, answer in zip(kept, cut, extended, strict=True):
            offset, before = first[index], generated[index].output_logprobs
            after = answer.output_logprobs
            if before is None or after is None or not len(after):
                continue
            row = len(sequence) - 1
            pairs.append(
                EqualRows(
                    request=index,
                    offset=offset,
                    same_token=int(before.token_id[offset]) == int(after.token_id[0]),
                    same_bits=np.float32(before.nats[offset]) == np.float32(after.nats[0]),
                    decode_rows=_rows(forwards, number, "generation", index, row),
                    extend_rows=_rows(forwards, number, "scoring", index, row),
                    cached_right=answer.cached_tokens == len(sequence) - 1,
                )
            )
        return pairs


def _first_decode_offset(columns: HelperColumns, request: int) -> int:
    """The first offset at which the request diverges, at least 1: token 0 is no decode's."""
    different = np.flatnonzero(differs(columns, columns.tokens_of(request)))
    return max(1, int(different[0])) if len(different) else 1


def _rows(forwards: Sequence[Composition], number: int, arm: str, request: int, row: int) -> int | None:
    """The rows of the forward that computed one row of a request alone, None where none did."""
    for forward in forwards:
        part = forward.part_of([number], arm, request)
        if part is not None and part.first_position == row and part.rows == 1:
            return forward.rows
    return None
