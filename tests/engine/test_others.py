"""Requests of others: exactly where a log of forwards tells, else what the server's counts prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from klbench.engine.client import Load
from klbench.engine.others import Others
from klbench.insitu.rids import RequestId

pytestmark = pytest.mark.faults

NONCE = "a1b2"


def rids(arm: Any, index: int) -> str:
    return str(RequestId(NONCE, 7, arm, False, index))


def line(number: int, *ids: str) -> str:
    parts = [[rid, 0, 3, 0, 3, "extend"] for rid in ids]
    return json.dumps({"n": number, "mode": "extend", "rows": 3 * len(ids), "requests": parts}) + "\n"


AGAIN = json.dumps({"n": 9, "mode": "decode", "rows": 3, "again": True}) + "\n"


async def test_one_request_of_others_in_a_forward_of_ours_is_seen_however_few_of_ours_run(
    tmp_path: Path,
) -> None:
    log = tmp_path / "forwards-0.jsonl"
    log.write_text(line(1, rids("generation", 0), "", "", ""))
    others = Others(log, NONCE, rids)
    with log.open("a") as file:
        file.write(line(2, rids("generation", 0), rids("generation", 1)) + AGAIN)
        file.write(line(3, rids("generation", 1), "") + AGAIN)

    # As many as ours: the counts alone would tell nothing.
    others.hear(Load(running=2, queued=0, used_tokens=9), ours=2)
    assert await others.most() == 1


async def test_requests_of_another_klbench_are_others(tmp_path: Path) -> None:
    log = tmp_path / "forwards-0.jsonl"
    others = Others(log, NONCE, rids)
    log.write_text(line(1, rids("scoring", 0), str(RequestId(NONCE, 8, "scoring", False, 0))))
    assert await others.most() == 1


async def test_forwards_without_one_of_ours_are_not_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "forwards-0.jsonl"
    others = Others(log, NONCE, rids)
    log.write_text(
        line(1, str(RequestId(NONCE, 8, "scoring", False, 0)), "", "") + line(2, rids("scoring", 0))
    )
    assert await others.most() == 0


async def test_counts_beyond_the_requests_of_an_arm_are_of_others() -> None:
    others = Others()
    others.hear(Load(running=2, queued=1, used_tokens=9), ours=4)
    assert await others.most() == 0
    # A scoring arm has fewer requests than the run: what missed the cache is not scored.
    others.hear(Load(running=2, queued=1, used_tokens=9), ours=2)
    assert await others.most() == 1


@pytest.mark.parametrize("content", ["no line\n", "", None])
async def test_a_log_that_cannot_be_read_tells_nothing_and_spoils_nothing(
    tmp_path: Path, content: str | None
) -> None:
    log = tmp_path / "forwards-0.jsonl"
    others = Others(log, NONCE, rids)
    if content is not None:
        log.write_text(content)
    others.hear(Load(running=5, queued=0, used_tokens=9), ours=4)
    assert await others.most() == 1
