"""The switch of the fault lab: what it asks of the server, and what it makes of the answers."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from klbench.engine import fault_control
from klbench.engine.fault_control import FaultControl
from klbench.errors import UndecidedError

NONCE = "a1b2"
PROOF = {
    "fault": "key-write",
    "params": {},
    "count": 16,
    "first": {"rid": "klb-a1b2-2g-0", "positions": [183], "rows": 4, "forward": 9},
}


async def _answer(folder: Path, rank: int, **fields: Any) -> dict[str, Any]:
    """Plays one rank: waits for the next request, answers it and returns it."""
    async with asyncio.timeout(60):
        while not (folder / "fault-control.json").exists():  # noqa: ASYNC110 - a file gives no event
            await asyncio.sleep(0)
    asked: dict[str, Any] = json.loads((folder / "fault-control.json").read_text())
    answer = {"seq": asked["seq"], "nonce": NONCE, "rank": rank, "ok": True, "error": None, **fields}
    (folder / f"fault-ack-{rank}.json").write_text(json.dumps(answer))
    return asked


async def test_every_rank_is_heard_and_what_was_disarmed_is_returned(tmp_path: Path) -> None:
    control = FaultControl(tmp_path, NONCE, [1, 0])
    fired, asked, _ = await asyncio.gather(
        control.disarm(),
        _answer(tmp_path, 0, disarmed=[PROOF]),
        _answer(tmp_path, 1, disarmed=[PROOF | {"count": 0, "first": None}]),
    )
    assert (asked["nonce"], asked["faults"]) == (NONCE, None)
    assert [(entry.rank, entry.count) for entry in fired] == [(0, 16), (1, 0)]
    assert (fired[0].fault, fired[0].first_rid, fired[0].first_positions) == (
        "key-write",
        "klb-a1b2-2g-0",
        (183,),
    )
    assert (fired[1].first_rid, fired[1].first_positions) == (None, ())


async def test_a_rank_that_refuses_says_why(tmp_path: Path) -> None:
    control = FaultControl(tmp_path, NONCE, [0])
    with pytest.raises(UndecidedError) as caught:
        await asyncio.gather(
            control.arm("window-short"),
            _answer(tmp_path, 0, ok=False, error="ValueError: the attention of layer 1 has no window"),
        )
    assert "has no window" in caught.value.why


async def test_a_server_without_the_permission_is_named_by_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_control, "WORDING", dataclasses.replace(fault_control.WORDING, limit_s=0.05))
    (tmp_path / "fault-ack-0.json").write_text(json.dumps({"seq": 1, "nonce": NONCE, "ok": True}))
    with pytest.raises(UndecidedError) as caught:
        await FaultControl(tmp_path, NONCE, [0]).arm("race")
    assert "does not answer about faults" in caught.value.what
