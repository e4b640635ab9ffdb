"""Reads dump files in a short process of the server's Python: klbench has no torch and trusts no pickle."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench.errors import UndecidedError

_LINE_LIMIT = 1 << 20
_ERROR_TAIL = 2000


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

    async def convert(self, dump_dir: Path, out_dir: Path, progress: Callable[[int, int], None]) -> Converted:
        """Turns the dumps into a trace in `out_dir`."""
        result = await self._run(["convert", str(dump_dir), str(out_dir)], b"", progress)
        try:
            names = ("forwards", "files", "dump_bytes", "trace_bytes")
            return Converted(*(int(result[name]) for name in names))
        except (KeyError, TypeError, ValueError) as error:
            raise UndecidedError("the dumps were not converted", why=f"an odd answer: {error}") from error

    async def fetch_rows(self, dump_dir: Path, wanted: list[dict[str, Any]], out_file: Path) -> None:
        """Writes the raw rows that are wanted (klbench/insitu/dumps.py) to `out_file`."""
        await self._run(["rows", str(dump_dir), str(out_file)], json.dumps(wanted).encode(), None)

    async def _run(
        self, arguments: list[str], stdin: bytes, progress: Callable[[int, int], None] | None
    ) -> dict[str, Any]:
        environment = {
            name: value for name, value in self.environment.items() if not name.startswith("KLBENCH_")
        }
        # Files beside it must not shadow the standard library.
        environment.setdefault("PYTHONSAFEPATH", "1")
        process = await asyncio.create_subprocess_exec(
            str(self.python),
            "-m",
            "klbench_insitu.dumps",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=os.path.dirname(arguments[1]) or None,
            limit=_LINE_LIMIT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        result: dict[str, Any] | None = None
        try:
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()
            async for line in process.stdout:
                content = json.loads(line)
                if "result" in content:
                    result = dict(content["result"])
                elif progress is not None:
                    progress(int(content["done"]), int(content["total"]))
            code = await process.wait()
        except (BrokenPipeError, ConnectionResetError, ValueError, KeyError, TypeError) as error:
            raise UndecidedError("the dump reader gave an odd answer", why=str(error)) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            said = (await errors).decode(errors="replace")
        if code != 0 or result is None:
            raise UndecidedError(
                "the dump files could not be read",
                why=said[-_ERROR_TAIL:].strip() or f"the reader ended with {code}",
                next=f"run it by hand: {self.python} -m klbench_insitu.dumps {' '.join(arguments)}",
            )
        return result
