"""Reads dump files in a process of the server's Python: klbench has no torch and trusts no pickle.

    kept = KeptReader(DumpProcess(python, environment))
    async with kept.started() as reader:
        await reader.convert(dump_dir, trace_dir, progress)
        await reader.fetch_rows(dump_dir, wanted, file)
    await kept.end()

Loading torch takes longer than reading the files: a session keeps one process from one capture to the next.
It ends with its standard input, so it never outlives klbench.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from klbench.errors import UndecidedError

_LINE_LIMIT = 1 << 20
_ERROR_TAIL = 2000
_KEPT_ERROR_BYTES = 1 << 16

Counted = Callable[[int, int], None]
"""Forwards done, and all."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion read and wrote."""

    forwards: int
    files: int
    dump_bytes: int
    trace_bytes: int


@dataclass(frozen=True, slots=True)
class DumpProcess:
    """How to start `klbench_insitu.dumps`: the server's Python and an environment in which it is found."""

    python: Path
    environment: Mapping[str, str]
    """The server's own environment; what activates the plugin is taken out."""

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[DumpReader]:
        """A process of its own, ended when the block is left."""
        reader = await self.start()
        try:
            yield reader
        finally:
            await asyncio.shield(reader.end())

    async def start(self) -> DumpReader:
        """The running process, which the caller ends. Raises UndecidedError where it cannot be started."""
        environment = {
            name: value for name, value in self.environment.items() if not name.startswith("KLBENCH_")
        }
        # Files of the current folder must not shadow the standard library.
        environment["PYTHONSAFEPATH"] = "1"
        command = (str(self.python), "-m", "klbench_insitu.dumps", "serve")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                limit=_LINE_LIMIT,
            )
        except OSError as error:
            raise UndecidedError(f"{self.python} cannot be started", why=str(error)) from error
        return DumpReader(process, " ".join(command))


class DumpReaders(Protocol):
    """Gives a reader for the length of a block: a new one each time, or one that is kept."""

    def started(self) -> AbstractAsyncContextManager[DumpReader]: ...


class KeptReader:
    """One reader for all blocks, started at the first; whoever makes this ends it.

    One that died, failed or was left while it still owed an answer is ended, and the next block gets a new
    one. Blocks wait for each other.
    """

    def __init__(self, process: DumpProcess) -> None:
        self._process = process
        self._reader: DumpReader | None = None
        self._one_block = asyncio.Lock()

    async def begin(self) -> None:
        """Starts it ahead of its first use, without waiting until it has loaded torch."""
        # Whoever needs it is told why it does not start.
        async with self._one_block:
            with contextlib.suppress(UndecidedError):
                await self._living()

    async def _living(self) -> DumpReader:
        if self._reader is not None and not self._reader.free:
            await self._dropped()
        if self._reader is None:
            self._reader = await self._process.start()
        return self._reader

    async def _dropped(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await asyncio.shield(reader.end())

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[DumpReader]:
        """The process, which goes on when the block is left. Raises UndecidedError where it cannot start."""
        async with self._one_block:
            reader = await self._living()
            try:
                yield reader
            finally:
                if not reader.free:
                    await self._dropped()

    async def end(self) -> None:
        """Ends the process, if there is one."""
        await self._dropped()


class DumpReader:
    """A running process that reads dumps, one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, command: str) -> None:
        self._process = process
        self._command = command
        self._said = b""
        self._owes_answer = False
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_KEPT_ERROR_BYTES):
            self._said = (self._said + chunk)[-_KEPT_ERROR_BYTES:]

    @property
    def free(self) -> bool:
        """Whether it runs and has answered all that it was asked."""
        return self._process.returncode is None and not self._owes_answer

    async def end(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        await self._listening

    async def convert(self, dump_dir: Path, out_dir: Path, progress: Counted) -> Converted:
        """Turns the dumps into a trace in `out_dir`."""
        asked = {"do": "convert", "dump_dir": str(dump_dir), "out_dir": str(out_dir)}
        result = await self._ask(asked, progress)
        try:
            names = ("forwards", "files", "dump_bytes", "trace_bytes")
            return Converted(*(int(result[name]) for name in names))
        except (KeyError, TypeError, ValueError) as error:
            raise UndecidedError("the dumps were not converted", why=f"an odd answer: {error}") from error

    async def fetch_rows(self, dump_dir: Path, wanted: list[dict[str, Any]], out_file: Path) -> None:
        """Writes the raw rows that are wanted (klbench/insitu/dumps.py) to `out_file`."""
        asked = {"do": "rows", "dump_dir": str(dump_dir), "wanted": wanted, "out_file": str(out_file)}
        await self._ask(asked, None)

    async def _ask(self, asked: dict[str, Any], progress: Counted | None) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._owes_answer = True
        try:
            stdin.write(json.dumps(asked).encode() + b"\n")
            await stdin.drain()
            while line := await stdout.readline():
                content = json.loads(line)
                if "result" in content:
                    result = dict(content["result"])
                    self._owes_answer = False
                    return result
                if progress is not None:
                    progress(int(content["done"]), int(content["total"]))
        except (ConnectionError, RecursionError, ValueError, KeyError, TypeError) as error:
            raise UndecidedError("the dump reader gave an odd answer", why=str(error)) from error
        code = await self._process.wait()
        await self._listening
        raise UndecidedError(
            "the dump files could not be read",
            why=self._said.decode(errors="replace")[-_ERROR_TAIL:].strip() or f"the reader ended with {code}",
            next=f"run it by hand, with the server's environment: {self._command}",
        )
