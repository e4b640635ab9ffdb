"""`klbench --version`, and with -vv what a report of a defect should name.

    klbench        0.1.0
    python         3.11.7 · /opt/conda/bin/python
    textual        8.2.8
    sglang         0.5.23 · /opt/conda/bin/python (active conda)
    torch          2.14.1 · CUDA 12.9
    terminal       xterm-256color · 120x40 · tmux · over SSH
    locale         UTF-8
    sessions       /home/a/.local/state/klbench/sessions

Versions are read from the packages' metadata; none of them is imported.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import click

import klbench

PACKAGES = ("textual", "rich", "numpy", "httpx", "msgspec", "safetensors")
_VERBOSITY = "klbench.verbosity"


def keep_verbosity(ctx: click.Context, _parameter: click.Parameter, count: int) -> None:
    """Keep how often -v stood there, for `print_version`."""
    ctx.meta[_VERBOSITY] = count


def verbosity(ctx: click.Context) -> int:
    count: int = ctx.meta.get(_VERBOSITY, 0)
    return count


def print_version(ctx: click.Context, _parameter: click.Parameter, asked: Any) -> None:
    """Print and end, where it was asked for."""
    if not asked or ctx.resilient_parsing:
        return
    if verbosity(ctx):
        from klbench.cli import table

        for name, found in details(os.environ):
            table.out(f"{name:<14} {found}")
    else:
        click.echo(f"klbench {klbench.__version__}")
    ctx.exit(0)


def details(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, what was found) of everything that a report of a defect should name."""
    return [
        ("klbench", klbench.__version__),
        ("python", f"{platform.python_version()} · {sys.executable}"),
        *((name, _version(name)) for name in PACKAGES),
        *_server(environment),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("terminal", _terminal(environment)),
        ("locale", _locale(environment)),
        *_paths(),
    ]


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _server(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """The sglang and torch of the Python that would run a server; asked in a process of its own."""
    import asyncio

    from klbench.engine.server_python import find_server_python
    from klbench.errors import KlbenchError

    try:
        found = asyncio.run(find_server_python(None, environment))
    except KlbenchError as error:
        return [("sglang", f"{error.what}: {error.why}")]
    torch = f"{found.torch_version or 'not installed'} · CUDA {found.torch_cuda or 'none'}"
    return [("sglang", f"{found.sglang_version} · {found.path} ({found.why})"), ("torch", torch)]


def _terminal(environment: Mapping[str, str]) -> str:
    import shutil

    size = shutil.get_terminal_size()
    words = [environment.get("TERM") or "TERM is not set"]
    words += [f"{size.columns}x{size.lines}" if sys.stdout.isatty() else "standard output is not one"]
    words += [f"COLORTERM={environment['COLORTERM']}"] if environment.get("COLORTERM") else []
    words += ["NO_COLOR"] if environment.get("NO_COLOR") else []
    words += ["tmux"] if environment.get("TMUX") else ["screen"] if environment.get("STY") else []
    words += ["over SSH"] if environment.get("SSH_CONNECTION") else []
    return " · ".join(words)


def _locale(environment: Mapping[str, str]) -> str:
    import locale

    given = [
        f"{name}={environment[name]}" for name in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(name)
    ]
    return " · ".join([locale.getpreferredencoding(False), *given])


def _paths() -> list[tuple[str, str]]:
    from klbench import paths, settings
    from klbench.zoo import zoo_root

    file = settings.config_file()
    return [
        ("sessions", str(paths.sessions_root())),
        ("configuration", f"{file}{'' if file.exists() else ' (there is none)'}"),
        ("models", str(zoo_root())),
    ]
