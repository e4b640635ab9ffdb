"""sglang's own report of its environment, as its maintainers ask for it in an issue.

Run in a Python that klbench found itself, never in one that a recorded session names: a session may come from
elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from klbench.engine.server_python import find_server_python
from klbench.errors import UndecidedError

_LIMIT_S = 180.0
_MOST_BYTES = 64 * 1024


async def environment_report(server_python: Path | None, sglang_version: str | None) -> str:
    """The output of `python -m sglang.check_env`. Raises KlbenchError where there is none, or where the
    sglang found here is another version than the one measured."""
    python = await find_server_python(server_python)
    if sglang_version is not None and python.sglang_version != sglang_version:
        raise UndecidedError(
            f"the sglang found here is {python.sglang_version}, measured was {sglang_version}",
            next="name its Python with --server-python",
        )
    process = await asyncio.create_subprocess_exec(
        *(str(python.path), "-m", "sglang.check_env"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    except TimeoutError:
        raise UndecidedError(f"sglang.check_env did not end within {_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    content = out[:_MOST_BYTES].decode("utf-8", errors="replace").strip()
    if process.returncode != 0 or not content:
        words = err.decode("utf-8", errors="replace").strip().splitlines()
        raise UndecidedError(
            f"sglang.check_env ended with exit code {process.returncode}",
            why=words[-1][:200] if words else "",
        )
    return content
