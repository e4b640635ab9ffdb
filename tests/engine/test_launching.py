"""Starts that go wrong, with processes that behave as sglang's do: what is said, and that it ends in time."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from klbench.engine import launching
from klbench.engine.advice import advice
from klbench.engine.client import ServerClient
from klbench.engine.launching import (
    LaunchError,
    PortTakenError,
    Unobserved,
    on_a_free_port,
    wait_ready,
)
from klbench.engine.process import Ended, LaunchSpec, ServerProcess, end_processes_of, free_port
from klbench.errors import DeadlineError
from tests.engine.test_phases import WATCHDOG

SCHEDULER_CRASH = """\
[2026-11-29 19:19:14] Load weight begin. avail mem=17.23 GB
[2026-11-29 19:19:15] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    forward()
{error}
"""

# What sglang and the libraries below it say, and a word of the advice.
TROUBLES = {
    "backend-refused": (
        "ValueError: deterministic inference does not support attention backend 'trtllm_mha'",
        "fa3",
    ),
    "shared-memory": (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, 147456",
        "another GPU",
    ),
    "port": ("ValueError: Port 30000 is not available", "ss -ltnp"),
    "kernels": (
        "ImportError: undefined symbol: _ZN3c104cuda9SetDeviceEi in sgl_kernel/common_ops.abi3.so",
        "fit",
    ),
    "weights": ("OSError: no file named model.safetensors found in /models/x", "download"),
    "tokenizer": ("OSError: Can't load tokenizer for '/models/x'", "--skip-tokenizer-init"),
    "out-of-memory": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.40 GiB",
        "--mem-fraction-static",
    ),
    "not-enough-memory": (
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "--samples",
    ),
    "watchdog": ("Watchdog timeout (watchdog_timeout=300, self.soft=False)", "--watchdog-timeout"),
    "disk": ("OSError: [Errno 28] No space left on device", "df -h"),
    "pool-leak": ("ValueError: token_to_kv_pool_allocator memory leak detected!", "condition 2"),
    "offline": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the file in the cache",
        "local folder",
    ),
    "unknown-flag": ("launch_server.py: error: unrecognized arguments: --no-such-flag", "--help"),
    "architecture": ("ValueError: Model architectures ['Foo'] are not supported for now.", "newer"),
    "package": ("ModuleNotFoundError: No module named 'sgl_kernel'", "klbench doctor"),
}


@pytest.mark.parametrize(("error", "word"), TROUBLES.values(), ids=TROUBLES)
def test_each_known_error_has_its_next_step(error: str, word: str) -> None:
    assert word in (advice(error) or "")


def test_an_unknown_error_gets_no_guess() -> None:
    assert advice("AssertionError: layers must be even") is None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ServerProcess]]:
    """A process that prints what it is given and then waits to be ended."""
    nonce = os.urandom(8).hex()

    def start(says: str, then: str = "time.sleep(600)") -> ServerProcess:
        program = tmp_path / "server"
        program.write_text(f"#!{sys.executable}\nimport sys, time\nprint({says!r}, flush=True)\n{then}\n")
        program.chmod(0o755)
        environment = dict(os.environ) | {"KLBENCH_NONCE": nonce}
        return ServerProcess.start(
            LaunchSpec(program, (), environment, tmp_path / "server.log", tmp_path, nonce)
        )

    yield start
    end_processes_of(nonce)


async def failure(process: ServerProcess, limit_s: float = 60) -> Exception:
    async with ServerClient(f"http://127.0.0.1:{free_port()}") as client:
        try:
            await wait_ready(process, client, Unobserved(), limit_s)
        except (LaunchError, DeadlineError) as error:
            return error
        finally:
            await process.stop()
    raise AssertionError("it became ready")


async def test_a_port_taken_between_its_choice_and_the_bind_ends_the_wait_at_once(start) -> None:  # type: ignore[no-untyped-def]
    # What uvicorn says, with the system's own words for it.
    line = (
        f"ERROR:    [Errno {errno.EADDRINUSE}] error while attempting to bind on address "
        f"('127.0.0.1', 30000): {os.strerror(errno.EADDRINUSE).lower()}"
    )
    error = await failure(start(line))
    assert isinstance(error, PortTakenError)
    assert "leave --port out" in error.next
    assert "address already in use" in error.ended.why


async def test_a_scheduler_that_crashed_alone_is_not_waited_for(start, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(launching, "_CRASH_GRACE_S", 0.2)
    words = SCHEDULER_CRASH.format(error="torch.OutOfMemoryError: CUDA out of memory")
    error = await failure(start(words))
    assert isinstance(error, LaunchError)
    assert "crashed while loading weights" in error.what
    assert "OutOfMemoryError" in error.why
    assert "--mem-fraction-static" in error.next
    assert str(error.log) in error.next


async def test_a_server_that_ends_says_its_own_error_and_the_next_step(start) -> None:  # type: ignore[no-untyped-def]
    words = "Traceback (most recent call last):\n  File x\nOSError: Can't load tokenizer for 'x'"
    error = await failure(start(words, "sys.exit(1)"))
    assert isinstance(error, LaunchError)
    assert "Can't load tokenizer" in error.why
    assert "--skip-tokenizer-init" in error.next


@pytest.mark.parametrize(
    ("words", "why", "next_step"),
    [
        (WATCHDOG, "watchdog timeout", "--watchdog-timeout SECONDS"),
        (
            SCHEDULER_CRASH.format(error="ValueError: full token_to_kv_pool memory leak detected! size=9"),
            "memory leak detected",
            "a lead to a wrong restore (condition 2): keep the log and the prompts",
        ),
    ],
    ids=["watchdog", "pool-leak"],
)
async def test_a_server_that_sglangs_own_checks_end_says_which_and_what_follows(  # type: ignore[no-untyped-def]
    start, words: str, why: str, next_step: str
) -> None:
    # As sglang does: a KILL comes last, and says nothing of the cause.
    error = await failure(start(words, "import os; os.kill(os.getpid(), 9)"))
    assert isinstance(error, LaunchError)
    assert why in error.why
    assert "the kernel" not in error.why
    assert next_step in error.next


async def test_a_start_that_hangs_says_what_it_was_doing(start) -> None:  # type: ignore[no-untyped-def]
    process = start("[2026-11-29 19:19:14] Load weight begin. avail mem=17.23 GB")
    async with asyncio.timeout(60):
        while b"avail mem" not in process.spec.log.read_bytes():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    error = await failure(process, 0)
    assert isinstance(error, DeadlineError)
    assert "loading weights" in error.what
    assert "Load weight begin" in error.why


async def test_a_start_that_says_nothing_says_that(start) -> None:  # type: ignore[no-untyped-def]
    error = await failure(start(""), 0)
    assert isinstance(error, DeadlineError)
    assert "nothing at all" in error.why


@pytest.mark.parametrize(
    ("taken", "ours", "starts"), [(0, True, 1), (2, True, 3), (3, True, 3), (1, False, 1), (0, False, 1)]
)
async def test_a_port_of_ours_is_chosen_again_and_the_users_is_not(
    tmp_path: Path, taken: int, ours: bool, starts: int
) -> None:
    tried: list[int] = []
    warned: list[str] = []

    class Warned(Unobserved):
        def warning(self, *args: object) -> None:
            warned.append(str(args[2]))

    async def start() -> str:
        tried.append(1)
        if len(tried) <= taken:
            ended = Ended(False, None, "taken", ())
            raise PortTakenError("taken", why="", next="", ended=ended, log=tmp_path)
        return "up"

    if taken < starts:
        assert await on_a_free_port(start, Warned(), ours=ours) == "up"
    else:
        with pytest.raises(PortTakenError):
            await on_a_free_port(start, Warned(), ours=ours)
    assert len(tried) == starts
    assert warned == ["started again on another port"] * (starts - 1)
