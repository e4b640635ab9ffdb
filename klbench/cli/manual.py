"""`klbench help`: the manual in the terminal, plain where stdout is none.

$ klbench help filter
The filter line

  `/` filters any table as you type; all terms must be met. ...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys

import click
from click.shell_completion import CompletionItem

from klbench.errors import ExitCode, UsageError

_MOST_CELLS = 100
_PLAIN_CELLS = 80
"""Where nobody says how wide the paper is."""


def complete_topic(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from klbench import manual

    return [
        CompletionItem(topic.name, help=manual.title(topic))
        for topic in manual.TOPICS
        if topic.name.startswith(incomplete)
    ]


@click.command("help")
@click.argument("topic", nargs=-1, shell_complete=complete_topic)
@click.pass_context
def help_(ctx: click.Context, topic: tuple[str, ...]) -> int:
    """The manual: one TOPIC of it, or the list of all; works without a network."""
    from klbench import manual
    from klbench.cli.table import out
    from klbench.manual.render import render

    if not topic:
        for one in manual.TOPICS:
            out(f"{one.name:<14} {manual.title(one)}")
        out()
        out("klbench help TOPIC shows one · klbench COMMAND --help lists a command's options")
        return ExitCode.CONSISTENT
    name = "-".join(topic).lower()
    root = ctx.find_root()
    command = root.command.get_command(ctx, name) if isinstance(root.command, click.Group) else None
    if name not in manual.BY_NAME and command is not None and not command.hidden:
        with click.Context(command, info_name=name, parent=root) as inner:
            click.echo(command.get_help(inner))
        return ExitCode.CONSISTENT
    _use_own_keys()
    bold = _takes_bold()
    width = _width()
    for line in render(manual.markdown(manual.find(" ".join(topic))), width):
        # Ours, and nothing in it comes from a server: marks of the terminal may be added.
        click.echo(click.style(line.text, bold=True) if line.heading and bold else line.text, color=bold)
    if command is not None:
        click.echo(f"\n  klbench {name} --help lists the command's options.")
    return ExitCode.CONSISTENT


def _use_own_keys() -> None:
    """The texts name the keys that the configuration gives; where it is not understood, the usual ones."""
    from klbench.tui import keymap

    with contextlib.suppress(UsageError):
        keymap.use(keymap.load())


def _takes_bold() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def _width() -> int:
    if not sys.stdout.isatty():
        return _PLAIN_CELLS
    return max(min(shutil.get_terminal_size().columns, _MOST_CELLS), 40)
