"""The doctor's checks against machines made to lack something."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from klbench.engine import machine
from klbench.engine.machine import check_machine
from klbench.engine.server_python import ServerPython

pytestmark = pytest.mark.faults


def server_python(path: Path, **changed: str | None) -> ServerPython:
    facts = {
        "why": "test",
        "python": "3.11.0",
        "sglang_path": path,
        "sglang_version": "0.5.23",
        "torch_version": "2.14.1+cu130",
        "torch_cuda": "13.0",
        "wants_torch": "==2.14.1",
        **changed,
    }
    return ServerPython(path=path, **facts)  # type: ignore[arg-type]


async def test_this_machine_is_told_line_by_line_and_nothing_is_left_out() -> None:
    checks = await check_machine(None)
    assert {check.name for check in checks} >= {
        *("sglang", "versions", "plugin", "gpu", "shm", "ports", "host", "route"),
    }
    assert all(check.mend for check in checks if check.status == "broken")


async def test_a_python_without_sglang_is_broken_and_names_the_flag(tmp_path: Path) -> None:
    (check,) = [check for check in await check_machine(tmp_path / "none") if check.name == "sglang"]
    assert check.status == "broken"
    assert "--server-python" in check.mend


@pytest.mark.parametrize(
    ("changed", "status", "word"),
    [
        ({}, "ok", "asks for"),
        ({"torch_version": "2.11.0"}, "note", "not 2.11.0"),
        ({"sglang_version": "0.5.9"}, "broken", "older than 0.5.17"),
    ],
)
def test_versions_that_do_not_fit_are_said(
    tmp_path: Path, changed: dict[str, str], status: str, word: str
) -> None:
    checks = machine._versions(server_python(tmp_path, **changed))
    assert checks[0].status == status
    assert word in checks[0].found


@pytest.mark.parametrize("wants", [None, ">=2.8"])
def test_versions_that_cannot_be_judged_are_not(tmp_path: Path, wants: str | None) -> None:
    assert server_python(tmp_path, wants_torch=wants).torch_fits is None


async def test_a_python_that_cannot_load_the_plugin_says_its_own_error(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'SyntaxError: too old' >&2\nexit 1\n")
    program.chmod(0o755)
    check = await machine._plugin(server_python(program), {})
    assert (check.status, check.name) == ("broken", "plugin")
    assert "SyntaxError: too old" in check.found


async def test_the_plugin_is_seen_by_a_python_without_our_packages(tmp_path: Path) -> None:
    # -S: without site-packages, as another environment's Python would be.
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    assert (await machine._plugin(server_python(program), {})).status == "ok"


def test_little_shared_memory_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    little = SimpleNamespace(total=64_000_000, free=64_000_000)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: little)
    check = machine._shared_memory(tmp_path)
    assert check.status == "note"
    assert "0.1 of 0.1 GB free" in check.found
    assert "--shm-size" in check.mend


def test_a_machine_without_loopback_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(machine, "free_port", refuse)
    assert machine._loopback().status == "broken"


async def test_a_host_name_without_an_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(machine.socket, "gethostbyname", fail)
    check = await machine._host_name()
    assert check.status == "note"
    assert "/etc/hosts" in check.mend


def test_a_machine_without_a_route_names_the_dumpers_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(machine.socket, "socket", Unreachable)
    check = machine._route()
    assert check.status == "note"
    assert "/dumper/configure" in check.found


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({"http_proxy": "http://p:3128"}, "note"),
        ({"http_proxy": "http://p:3128", "no_proxy": "127.0.0.1"}, "ok"),
    ],
)
def test_a_proxy_is_named_and_its_address_is_not(environment: dict[str, str], status: str) -> None:
    (check,) = machine._proxies(environment)
    assert check.status == status
    assert "3128" not in check.found
