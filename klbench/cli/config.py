"""`klbench config` and `klbench completion`.

workbench.theme        light   remembered
run.server_python      …       KLBENCH_SERVER_PYTHON
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from klbench.cli import options as opt
from klbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from klbench.settings import Value

SHELLS = ("bash", "zsh", "fish")


@click.group()
def config() -> None:
    """What can be set once: a TOML file, environment variables; every value with its origin."""


@config.command("show")
@opt.json_option
def show(json_place: str | None) -> int:
    """Print every setting: its value, and where that comes from."""
    from klbench import settings
    from klbench.cli import table
    from klbench.cli.failures import write_json
    from klbench.tui import keymap

    found = keymap.load()
    if json_place is not None:
        values = {key: {"value": found[key], "origin": found.of(key).origin} for key in found}
        keys = {name: {"keys": list(keys), "origin": found.file} for name, keys in found.bound.items()}
        write_json(json_place, {"file": str(settings.config_file()), "settings": values, "keys": keys})
    if json_place == "-":
        return ExitCode.CONSISTENT
    rows = [(key, _shown(found[key]), found.of(key).origin, found.of(key).setting.variable) for key in found]
    rows += [(f"keys.{name}", " ".join(keys), found.file, "–") for name, keys in found.bound.items()]
    for line in table.columns(("setting", "value", "from", "variable"), rows):
        table.out(line)
    file = settings.config_file()
    table.out(f"file: {file}{'' if file.exists() else ' (there is none)'}")
    return ExitCode.CONSISTENT


@config.command("path")
def path() -> int:
    """Print where the file is looked for."""
    from klbench import settings

    click.echo(str(settings.config_file()))
    return ExitCode.CONSISTENT


@config.command("example")
def example() -> int:
    """Print a file with every key at its default, commented out."""
    from klbench import settings

    click.echo(settings.example(), nl=False)
    return ExitCode.CONSISTENT


@config.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
def check(file: Path | None) -> int:
    """Say whether the file (or another one) and the variables are understood; exit code 2 where not."""
    from klbench import settings
    from klbench.tui import keymap

    place = file or settings.config_file()
    if file is not None and not file.exists():
        raise UsageError(f"there is no file {file}")
    keymap.load(os.environ, place)
    if place.exists():
        click.echo(f"{place} and the variables are understood")
    else:
        folder, new = shlex.quote(str(place.parent)), shlex.quote(str(place))
        click.echo(f"the variables are understood; there is no file {place}")
        click.echo(f"one to begin with: mkdir -p {folder} && klbench config example > {new}")
    return ExitCode.CONSISTENT


def _shown(value: Value | None) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print what completes klbench's commands, options and sessions in a shell.

    \b
    bash   klbench completion bash > ~/.local/share/bash-completion/completions/klbench
    zsh    klbench completion zsh > "${fpath[1]}/_klbench"
    fish   klbench completion fish > ~/.config/fish/completions/klbench.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    root = click.get_current_context().find_root().command
    assert kind is not None
    click.echo(kind(root, {}, "klbench", "_KLBENCH_COMPLETE").source())
    return ExitCode.CONSISTENT
