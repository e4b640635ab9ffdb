"""Which CUDA GPUs are here, which the user lets us see, and which one a demo may take.

Asked of `nvidia-smi`, so that klbench needs no CUDA library; without it there is no GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LIMIT_S = 20.0
_GIB = 1024**3
_IDLE_BYTES = 1 * _GIB
_DEMO_BYTES = 16 * _GIB
_QUERY = "index,uuid,name,driver_version,memory.used,memory.total"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver sees it."""

    index: int
    uuid: str
    name: str
    driver: str
    used_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    @property
    def sentence(self) -> str:
        used, total = self.used_bytes / _GIB, self.total_bytes / _GIB
        return f"GPU {self.index} ({self.name}): {used:.1f} of {total:.1f} GiB in use"


@dataclass(frozen=True, slots=True)
class Choice:
    """The GPU for a demo, or None with the reason why it runs on the CPU. `notes` name what was not taken."""

    gpu: Gpu | None
    notes: tuple[str, ...]


async def list_gpus() -> list[Gpu]:
    """All GPUs of this machine; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    process = await asyncio.create_subprocess_exec(
        *(program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    except TimeoutError:
        return []
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return parse_gpus(out.decode("utf-8", errors="replace")) if process.returncode == 0 else []


def parse_gpus(answer: str) -> list[Gpu]:
    """The GPUs in nvidia-smi's comma separated answer (memory in MiB); other lines are left out."""
    gpus = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        with contextlib.suppress(ValueError):
            index, uuid, name, driver, used, total = fields
            gpus.append(Gpu(int(index), uuid, name, driver, int(used) << 20, int(total) << 20))
    return gpus


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES lets a program see, in its order; all where it is not set.

    As CUDA does, an entry that names no GPU ends the list.
    """
    environment = os.environ if environment is None else environment
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    seen: list[Gpu] = []
    for entry in (part.strip() for part in listed.split(",")):
        found = next(
            (
                gpu
                for gpu in gpus
                if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
            ),
            None,
        )
        if found is None or found in seen:
            break
        seen.append(found)
    return seen


def choose_for_demo(visible: Sequence[Gpu]) -> Choice:
    """An idle GPU, else one with plenty of free memory, else none: what others fill is named, not taken."""
    if not visible:
        return Choice(None, ("no CUDA GPU is visible: the demo runs on the CPU",))
    idle = next((gpu for gpu in visible if gpu.used_bytes < _IDLE_BYTES), None)
    if idle is not None:
        return Choice(idle, ())
    roomy = max(visible, key=lambda gpu: gpu.free_bytes)
    if roomy.free_bytes >= _DEMO_BYTES:
        return Choice(roomy, (f"no GPU is idle; the demo shares {roomy.sentence}",))
    filled = tuple(gpu.sentence for gpu in visible)
    return Choice(None, (*filled, "no GPU has room: the demo runs on the CPU"))
