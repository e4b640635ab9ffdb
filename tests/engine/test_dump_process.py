"""The reader of dump files is kept from one use to the next, and replaced when it cannot be trusted."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from klbench.engine.dump_process import DumpProcess, DumpReader, KeptReader
from klbench.errors import UndecidedError

STAND_IN = """
import json, os, sys

for line in sys.stdin:
    wanted = json.loads(line)["dump_dir"]
    if wanted == "die":
        sys.exit("no more memory")
    if wanted == "odd":
        print("what?", flush=True)
        continue
    if wanted == "hang":
        print(json.dumps({"done": 1, "total": 2}), flush=True)
        sys.stdin.readline()
    answer = {"forwards": os.getpid(), "files": 0, "dump_bytes": 0, "trace_bytes": 0}
    print(json.dumps({"result": answer}), flush=True)
"""
"""Stands for klbench_insitu.dumps: answers with its own process id."""


@pytest.fixture
def process(tmp_path: Path) -> DumpProcess:
    package = tmp_path / "klbench_insitu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "dumps.py").write_text(STAND_IN)
    return DumpProcess(Path(sys.executable), {"PYTHONPATH": str(tmp_path)})


@pytest.fixture
async def kept(process: DumpProcess) -> AsyncIterator[KeptReader]:
    reader = KeptReader(process)
    yield reader
    await reader.end()


def nothing(done: int, total: int) -> None:
    pass


async def pid(reader: DumpReader, wanted: str = "dumps") -> int:
    return (await reader.convert(Path(wanted), Path("trace"), nothing)).forwards


async def pid_of_next(readers: KeptReader | DumpProcess) -> int:
    async with readers.started() as reader:
        return await pid(reader)


def lives(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


async def test_one_process_serves_all_captures_of_a_session(kept: KeptReader) -> None:
    first = await pid_of_next(kept)
    assert await pid_of_next(kept) == first
    assert lives(first)


async def test_without_keeping_each_block_has_its_own_process(process: DumpProcess) -> None:
    first, second = await pid_of_next(process), await pid_of_next(process)
    assert first != second
    assert not lives(first)
    assert not lives(second)


async def test_it_ends_with_the_session(kept: KeptReader) -> None:
    number = await pid_of_next(kept)
    await kept.end()
    assert not lives(number)
    await kept.end()


async def test_it_may_begin_before_it_is_needed(kept: KeptReader) -> None:
    await kept.begin()
    first = await pid_of_next(kept)
    await kept.begin()
    assert await pid_of_next(kept) == first


async def test_one_that_was_killed_is_replaced(kept: KeptReader) -> None:
    async with kept.started() as reader:
        first = await pid(reader)
    os.kill(first, 9)
    await reader.end()
    assert not reader.free
    assert await pid_of_next(kept) != first


@pytest.mark.parametrize(("trouble", "why"), [("die", "no more memory"), ("odd", "Expecting value")])
async def test_one_that_failed_says_why_and_is_replaced(kept: KeptReader, trouble: str, why: str) -> None:
    async with kept.started() as reader:
        first = await pid(reader)
        with pytest.raises(UndecidedError) as failed:
            await pid(reader, trouble)
    assert why in failed.value.why
    assert await pid_of_next(kept) != first
    assert not lives(first)


async def test_one_that_still_owes_an_answer_is_replaced(kept: KeptReader) -> None:
    first = await pid_of_next(kept)
    asked = asyncio.Event()

    async def cancelled_in_between() -> None:
        async with kept.started() as reader:
            await reader.convert(Path("hang"), Path("trace"), lambda _done, _total: asked.set())

    task = asyncio.create_task(cancelled_in_between())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not lives(first)
    assert await pid_of_next(kept) != first


async def test_what_fails_beside_it_costs_no_new_process(kept: KeptReader) -> None:
    first = await pid_of_next(kept)
    with pytest.raises(UndecidedError, match="cannot be paired"):
        async with kept.started():
            raise UndecidedError("the rows cannot be paired")
    assert await pid_of_next(kept) == first


async def test_a_python_that_is_not_there_is_told_to_who_needs_it(tmp_path: Path) -> None:
    kept = KeptReader(DumpProcess(tmp_path / "python", {}))
    await kept.begin()
    with pytest.raises(UndecidedError, match="cannot be started"):
        await pid_of_next(kept)
    await kept.end()
