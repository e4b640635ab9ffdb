"""Runs rows of the GPU list side by side on this machine and writes what they answered.

    $ python3 -m tests.gpu.run --out /tmp/rows --models /tmp/models --deadline 520 --at-once 7 dense-page1 fp8
    dense-page1    right      168 s  match clean, 0 of 4096 differ, ...

Resumable: a row whose folder has a `row.json` of the same commit is not run again. Each row has a folder of
its own with the JSON of its commands, its logs and its session; `rows.json` is whole after every row. Rows
that are still at work at the deadline are ended and say so. Rows that measure time come last, one by one.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klbench.engine.gpu import list_gpus
from tests.gpu.judgement import in_words, wrong
from tests.gpu.models import make
from tests.gpu.rows import CALLS, ROWS, Place, Row

# Below the ports that a system hands out itself; sglang takes some of the thousand behind its own, too.
_FIRST_PORT = 10_000
_PORTS_APART = 1_100
MOST_AT_ONCE = 20
_GRACE_S = 8.0


class Runner:
    """The rows of one call. `commit` is klbench's, as the results keep it."""

    def __init__(
        self, out: Path, models: Path, deadline_s: float, at_once: int, gpus: int, commit: str = ""
    ) -> None:
        self._out = out
        self._models = models
        self._deadline = time.monotonic() + deadline_s
        self._at_once = at_once
        self._places: asyncio.Queue[int] = asyncio.Queue()
        self._gpus = gpus
        self._commit = commit
        self._made: dict[str, asyncio.Task[Path]] = {}
        self._results: list[dict[str, Any]] = []

    async def run(self, rows: Sequence[Row]) -> None:
        """Runs the rows that have no result yet."""
        for place in range(self._at_once):
            self._places.put_nowait(place)
        for name in dict.fromkeys(name for row in rows for name in row.models):
            self._made[name] = asyncio.create_task(asyncio.to_thread(_make_apart, name, self._models))
        await asyncio.gather(*(self._row(row) for row in rows if not row.alone))
        for row in rows:
            if row.alone:
                await self._row(row)

    async def _row(self, row: Row) -> None:
        folder = self._out / row.name
        result_file = folder / "row.json"
        if (
            result_file.exists()
            and (kept := json.loads(result_file.read_text())).get("commit") == self._commit
        ):
            self._keep(kept)
            return
        place = await self._places.get()
        try:
            models = {name: await self._made[name] for name in row.models}
            # What another commit, or a call that was cut, left there says nothing of this one.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, mode=0o700)
            began = time.monotonic()
            own = Place(folder, port_of(place), models)
            try:
                codes = await self._commands(folder, row.commands(own), self._gpus_for(row, place))
                result = judged(row, folder) | {"exit_codes": codes}
            except TimeoutError:
                result = _not_run("the time was up")
            result |= {
                "name": row.name,
                "number": row.number,
                "what": row.what,
                "commit": self._commit,
                "elapsed_s": round(time.monotonic() - began, 1),
            }
            if result["answer"] != "not_run":
                result_file.write_text(json.dumps(result, indent=1))
            self._keep(result)
        finally:
            self._places.put_nowait(place)

    def _gpus_for(self, row: Row, place: int) -> str:
        """The indices that a row may see: rows that need one GPU take turns."""
        first = place % self._gpus if row.gpus == 1 else 0
        return ",".join(str(first + index) for index in range(row.gpus))

    async def _commands(self, folder: Path, commands: Sequence[Sequence[str]], gpus: str) -> list[int]:
        codes = []
        for number, command in enumerate(commands, 1):
            environment = os.environ | {
                "KLBENCH_HOME": str(folder / "home"),
                "CUDA_VISIBLE_DEVICES": gpus,
                # Other rows fill the GPUs unevenly.
                "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
                # sglang's own helpers send no key, and the box is nobody else's.
                "KLBENCH_SERVER_KEY": "never",
            }
            with (folder / f"log-{number}.txt").open("wb") as log:
                log.write((" ".join(command) + "\n").encode())
                log.flush()
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=log, stderr=log, env=environment, start_new_session=True
                )
                try:
                    left_s = self._deadline - time.monotonic()
                    codes.append(await asyncio.wait_for(process.wait(), max(left_s, 1.0)))
                except TimeoutError:
                    await _end(process)
                    raise
        return codes

    def _keep(self, result: dict[str, Any]) -> None:
        self._results.append(result)
        content = sorted(self._results, key=lambda one: (one["number"], one["name"]))
        (self._out / "rows.json").write_text(json.dumps(content, indent=1))
        head = f"{result['name']:14s} {result['answer']:9s} {result['elapsed_s']:4.0f} s"
        print(f"{head}  {in_words(result)}", flush=True)


def port_of(place: int) -> int:
    """The port of the server at one of the places that work at the same time."""
    return _FIRST_PORT + _PORTS_APART * place


def _make_apart(name: str, root: Path) -> Path:
    return make(name, root)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, for klbench ends its server then; SIGKILL to what is left of the group."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def judged(row: Row, folder: Path) -> dict[str, Any]:
    """What a row's documents say, beside what must be."""
    documents = {}
    for path in folder.glob("*.json"):
        if path.stem == "row":
            continue
        with contextlib.suppress(ValueError):
            documents[path.stem] = json.loads(path.read_text())
    if not documents:
        return _not_run("no command wrote its result")
    for document in documents.values():
        if isinstance(document, dict) and (error := document.get("error")) and not document.get("cases"):
            return _not_run(f"{error['what']}: {error['why']}")
    try:
        found, said = row.check(documents), row.says(documents)
    except (KeyError, TypeError, IndexError) as error:
        found, said = wrong(f"no answer: {type(error).__name__} {error}"), ""
    return {
        "answer": found.answer,
        "said": said,
        "wrong": list(found.wrong),
        "undecided": list(found.undecided),
    }


def _not_run(why: str) -> dict[str, Any]:
    return {"answer": "not_run", "said": why, "wrong": [], "undecided": []}


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs rows of the GPU list.")
    parser.add_argument("names", nargs="*", metavar="ROW", help=f"of: {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds for all rows together")
    parser.add_argument("--at-once", type=int, choices=range(1, MOST_AT_ONCE + 1), metavar="N", default=7)
    parser.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="a part of the whole list")
    parser.add_argument("--commit", default="", help="of klbench, kept in the results")
    arguments = parser.parse_args()
    by_name = {row.name: row for row in ROWS}
    names = arguments.names or (CALLS[arguments.call - 1] if arguments.call else [])
    gpus = max(len(asyncio.run(list_gpus())), 1)
    rows = [by_name[name] for name in names] or list(ROWS)
    for row in rows:
        if row.gpus > gpus:
            print(f"{row.name:14s} not run: it needs {row.gpus} GPUs", flush=True)
    rows = [row for row in rows if row.gpus <= gpus]
    arguments.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(
        arguments.out, arguments.models, arguments.deadline, arguments.at_once, gpus, arguments.commit
    )
    asyncio.run(runner.run(rows))
    answers = json.loads((arguments.out / "rows.json").read_text())
    return 0 if all(answer["answer"] == "right" for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
