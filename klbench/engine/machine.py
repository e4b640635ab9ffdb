"""What a machine must have for a server to start and to be looked into: one check after the other.

Nothing here starts a server, sends a packet or changes anything; each check takes milliseconds, the one of
the plugin a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from klbench.engine.gpu import list_gpus
from klbench.engine.orphans import find_orphans
from klbench.engine.process import free_port
from klbench.engine.pythonpath import PLUGIN_GROUP, PLUGIN_NAME, plugin_environment
from klbench.engine.server_python import ServerPython, find_server_python
from klbench.engine.versions import OLDEST, doubt_about, number_of
from klbench.errors import KlbenchError

_SMALL_SHM_BYTES = 1 << 30
_NAME_LIMIT_S = 2.0
_PLUGIN_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line: `status` is ok, note or broken; `mend` says what to do about it."""

    status: str
    name: str
    found: str
    mend: str = ""


async def check_machine(named: Path | None, environment: Mapping[str, str] | None = None) -> list[Check]:
    """All checks. `named` is the Python of --server-python."""
    environment = os.environ if environment is None else environment
    return [
        *await _sglang(named, environment),
        *await _gpus(environment),
        _shared_memory(Path("/dev/shm")),
        _loopback(),
        await _host_name(),
        _route(),
        *_proxies(environment),
        *_orphans(),
    ]


async def _sglang(named: Path | None, environment: Mapping[str, str]) -> list[Check]:
    try:
        python = await find_server_python(named, environment)
    except KlbenchError as error:
        mend = f"{error.next}; --url works without"
        return [Check("broken", "sglang", f"{error.what}: {error.why}", mend)]
    found = f"{python.sentence}, torch {python.torch_version}, CUDA {python.torch_cuda or 'none'}"
    checks = [Check("ok", "sglang", found), *_versions(python), await _plugin(python, environment)]
    return checks + [Check("note", "sglang", f"passed over {text}") for text in python.passed_over]


def _versions(python: ServerPython) -> list[Check]:
    checks = []
    if (doubt := doubt_about(python.sglang_version)) is not None:
        older = (number_of(python.sglang_version) or ()) < (number_of(OLDEST) or ())
        mend = f"install sglang>={OLDEST} there" if older else "should something fail, tell which"
        checks.append(Check("broken" if older else "note", "versions", doubt, mend))
    if python.torch_fits is False:
        found = (
            f"sglang {python.sglang_version} asks for torch{python.wants_torch}, not {python.torch_version}"
        )
        mend = "its kernels may not load: install the torch that it asks for"
        checks.append(Check("note", "versions", found, mend))
    elif python.torch_fits:
        checks.append(Check("ok", "versions", f"torch {python.torch_version} is what this sglang asks for"))
    return checks


# Run by the server's own Python, with the environment that a launch would give it.
_SEE_PLUGIN = f"""
from importlib.metadata import entry_points
found = [entry for entry in entry_points(group="{PLUGIN_GROUP}") if entry.name == "{PLUGIN_NAME}"]
assert found, "its entry point is not found"
found[0].load()
"""


async def _plugin(python: ServerPython, environment: Mapping[str, str]) -> Check:
    """Whether the server's Python finds klbench's plugin, as it would in a launch."""
    with tempfile.TemporaryDirectory(prefix="klbench-doctor-") as place:
        theirs = plugin_environment(Path(place), "doctor", cpu=False, fault=None, base_env=environment)
        process = await asyncio.create_subprocess_exec(
            *(str(python.path), "-c", _SEE_PLUGIN),
            env=theirs,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, err = await asyncio.wait_for(process.communicate(), _PLUGIN_LIMIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            return Check("broken", "plugin", f"{python.path} did not answer within {_PLUGIN_LIMIT_S:.0f} s")
    if process.returncode == 0:
        return Check("ok", "plugin", "the server's Python finds klbench's plugin")
    words = err.decode("utf-8", errors="replace").strip().splitlines()
    found = f"the server's Python cannot load klbench's plugin: {words[-1] if words else process.returncode}"
    return Check("broken", "plugin", found, "it needs Python 3.10 or later; try another with --server-python")


async def _gpus(environment: Mapping[str, str]) -> list[Check]:
    gpus = await list_gpus()
    if not gpus:
        found = "no CUDA GPU: --demo uses the embedded engine, the real sglang on the CPU"
        return [Check("note", "gpu", found, f"{os.cpu_count()} CPU cores here")]
    checks = [Check("ok", "gpu", f"{gpu.sentence}, driver {gpu.driver}") for gpu in gpus]
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        checks.append(Check("note", "gpu", f"CUDA_VISIBLE_DEVICES={visible} is respected"))
    return checks


def _shared_memory(place: Path) -> Check:
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return Check("note", "shm", f"{place}: {error.strerror}", "servers of several GPUs need it")
    found = f"{usage.free / 1000**3:.1f} of {usage.total / 1000**3:.1f} GB free in {place}"
    if usage.free < _SMALL_SHM_BYTES:
        mend = "with --tp-size above 1 NCCL needs about 1 GB: docker run --shm-size 16g, or --ipc host"
        return Check("note", "shm", found, mend)
    return Check("ok", "shm", found)


def _loopback() -> Check:
    try:
        port = free_port()
    except OSError as error:
        mend = "servers listen on 127.0.0.1: bring the loopback interface up (ip link set lo up)"
        return Check("broken", "ports", f"no port on 127.0.0.1: {error.strerror}", mend)
    return Check("ok", "ports", f"127.0.0.1 gives ports, {port} for example")


async def _host_name() -> Check:
    name = socket.gethostname()
    began = time.monotonic()
    mend = f"add a line `127.0.1.1 {name}` to /etc/hosts, or start servers with SGLANG_HOST_IP=127.0.0.1"
    try:
        address = await asyncio.wait_for(asyncio.to_thread(socket.gethostbyname, name), _NAME_LIMIT_S)
    except TimeoutError:
        found = f"the host name {name} takes more than {_NAME_LIMIT_S:.0f} s to look up: servers hang there"
        return Check("note", "host", found, mend)
    except OSError as error:
        return Check("note", "host", f"the host name {name} has no address ({error})", mend)
    return Check("ok", "host", f"{name} is {address}, found in {(time.monotonic() - began) * 1000:.0f} ms")


def _route() -> Check:
    """Whether there is a default route; asking the kernel sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return Check("ok", "route", f"other networks are reached from {probe.getsockname()[0]}")
    mend = "start such a server without DUMPER_SERVER_PORT; servers that klbench starts are not concerned"
    found = "no route to other networks: /dumper/configure of an attached server would hang its scheduler"
    return Check("note", "route", found, mend)


def _proxies(environment: Mapping[str, str]) -> list[Check]:
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    given = [name for name in names if environment.get(name)]
    if not given:
        return []
    found = f"{', '.join(given)} set: klbench ignores it on loopback"
    no_proxy = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if "127.0.0.1" in no_proxy or no_proxy.strip() == "*":
        return [Check("ok", "proxy", found)]
    mend = "sglang's own warm-up request may not: export no_proxy=127.0.0.1,localhost"
    return [Check("note", "proxy", found, mend)]


def _orphans() -> list[Check]:
    return [
        Check("note", "left over", orphans.sentence, "klbench doctor --end-left-over ends them")
        for orphans in find_orphans()
    ]
