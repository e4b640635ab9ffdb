"""The control file and its acknowledgement, with a stand-in for the server's side."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from klbench.engine import control_file
from klbench.engine.capture_control import CaptureControl, RequestIds
from klbench.engine.control_file import ControlFile, Wording
from klbench.errors import UndecidedError
from klbench.insitu.rids import parse_rid

NONCE = "a1b2"
Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


async def opened(control_dir: Path, folder: Path, answer: Answer, ranks: tuple[int, ...] = (0,)) -> None:
    """Opens a capture while something answers the control file for each rank."""

    async def serve() -> None:
        done = 0
        while done < len(ranks):
            path = control_dir / "capture-control.json"
            if path.exists():
                asked = json.loads(path.read_text())
                for rank in ranks[done:]:
                    reply = answer(asked | {"rank": rank})
                    done += 1
                    if reply is not None:
                        (control_dir / f"capture-ack-{rank}.json").write_text(json.dumps(reply))
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve())
    control = CaptureControl(control_dir, NONCE, ranks)
    try:
        await asyncio.wait_for(control.open(folder, free_floor_bytes=1, size_cap_bytes=2), 60)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def agreed(asked: dict[str, Any]) -> dict[str, Any]:
    ready = Path(asked["capture"]["folder"]) / f"ready-{asked['rank']}.json"
    ready.write_text(json.dumps({"nonce": asked["nonce"]}))
    return {"seq": asked["seq"], "nonce": asked["nonce"], "ok": True, "error": None}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    control, dumps = tmp_path / "control", tmp_path / "dumps"
    control.mkdir()
    dumps.mkdir()
    return control, dumps


async def test_a_capture_is_open_once_every_rank_has_agreed(folders: tuple[Path, Path]) -> None:
    await opened(*folders, agreed, ranks=(0, 1))

    asked = json.loads((folders[0] / "capture-control.json").read_text())
    assert asked["capture"]["folder"] == str(folders[1])
    assert asked["nonce"] == NONCE


async def test_a_rank_that_sees_another_folder_is_named(folders: tuple[Path, Path]) -> None:
    def elsewhere(asked: dict[str, Any]) -> dict[str, Any]:
        return {"seq": asked["seq"], "nonce": NONCE, "ok": True}

    with pytest.raises(UndecidedError, match="does not see"):
        await opened(*folders, elsewhere)


async def test_a_refusal_carries_the_servers_own_words(folders: tuple[Path, Path]) -> None:
    def refused(asked: dict[str, Any]) -> dict[str, Any]:
        return {"seq": asked["seq"], "nonce": NONCE, "ok": False, "error": "the dumper is in use"}

    with pytest.raises(UndecidedError) as caught:
        await opened(*folders, refused)
    assert caught.value.why == "the dumper is in use"


@pytest.mark.parametrize("stale", [{"seq": 0, "nonce": NONCE, "ok": True}, {}, []])
async def test_an_old_or_odd_acknowledgement_is_none(folders: tuple[Path, Path], stale: object) -> None:
    (folders[0] / "capture-ack-0.json").write_text(json.dumps(stale))

    with pytest.raises(UndecidedError, match="does not answer"):
        await CaptureControl(folders[0], NONCE, [0]).close(limit_s=0)


def test_a_report_that_the_full_disk_kept_out_of_the_folder_is_found(folders: tuple[Path, Path]) -> None:
    control = CaptureControl(folders[0], NONCE, [0])
    assert control.invalid(folders[1]) is None

    (folders[0] / "invalid-0.json").write_text(json.dumps({"what": "OSError: no space left"}))

    assert control.invalid(folders[1]) == "rank 0: OSError: no space left"


async def test_a_new_capture_forgets_the_report_of_the_last_one(folders: tuple[Path, Path]) -> None:
    (folders[0] / "invalid-0.json").write_text(json.dumps({"what": "old"}))

    await opened(*folders, agreed)

    assert CaptureControl(folders[0], NONCE, [0]).invalid(folders[1]) is None


def test_each_pass_has_ids_of_its_own_and_arms_only_what_was_chosen() -> None:
    ids = RequestIds(NONCE)
    first, second = ids.next_pass(), ids.next_pass({3})

    assert ids.latest_pass == 2
    parsed = [parse_rid(rid("scoring", 3), NONCE) for rid in (first, second)]
    assert [(p.number, p.armed) for p in parsed if p is not None] == [(1, False), (2, True)]
    other = parse_rid(second("scoring", 4), NONCE)
    assert other is not None
    assert not other.armed


@pytest.mark.parametrize(("last_word", "answered"), [({}, True), ({"working": 4}, False)])
async def test_a_rank_that_says_that_it_works_is_waited_for_and_a_silent_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_word: dict[str, Any], answered: bool
) -> None:
    """Each look at the clock takes 50 ms of the limit of 200; what is heard anew gives all of it again."""
    words = itertools.chain(({"working": count} for count in range(1, 5)), itertools.repeat(last_word))

    def heard(_: Path) -> dict[str, Any]:
        asked = json.loads((tmp_path / "capture-control.json").read_text())
        return {"seq": asked["seq"], "nonce": NONCE, "ok": True} | next(words)

    ticks = itertools.count()
    monkeypatch.setattr(control_file, "read_small_json", heard)
    monkeypatch.setattr(control_file, "_POLL_S", 0)
    monkeypatch.setattr(control_file, "time", SimpleNamespace(monotonic=lambda: 0.05 * next(ticks)))
    wording = Wording(about="captures", refused="refused", silent_next="wait", limit_s=0.2)
    control = ControlFile(tmp_path, NONCE, [0], "capture", wording)
    if answered:
        assert (await control.ask(None))[0]["ok"] is True
    else:
        with pytest.raises(UndecidedError, match="does not answer"):
            await control.ask(None)
