"""How failures leave the program: one line for a person, an `error` object for a machine, an exit code.

klbench: port 30000 is taken · pid 4211 (python) listens there · name another with -- --port N
{"schema": "klbench.progress/1", "at": 1.5, "type": "error", "what": "port 30000 is taken", "why": ..., ...}

The second where `--progress json` was asked for: then every line on stderr is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import click

from klbench.cli import streams
from klbench.core.text import visible
from klbench.errors import ExitCode, KlbenchError


class Interrupted(BaseException):
    """A signal ended the command. Not an Exception: nothing between here and `main` may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.exit_code = ExitCode(128 + signum)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalSwitch:
    """What SIGINT, SIGTERM and SIGHUP do at the moment: by default they raise Interrupted in the main thread.

    One handler for the whole command, for between two handlers a signal kills.
    """

    def __init__(self) -> None:
        self.react: Callable[[int], None] | None = None
        """Called in the main thread instead of raising; must return at once."""

    def received(self, signum: int, _: FrameType | None) -> None:
        if self.react is None:
            raise Interrupted(signum)
        self.react(signum)

    def hold_once(self) -> None:
        """Lets what goes on now end: the next signal is swallowed, one more ends it all the same."""

        def hold(_: int) -> None:
            self.react = None

        self.react = hold


@contextlib.contextmanager
def signals_switched() -> Iterator[SignalSwitch]:
    """Inside, the three signals go through the switch."""
    switch = SignalSwitch()
    before = {number: signal.signal(number, switch.received) for number in SIGNALS}
    try:
        yield switch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Voice:
    """How lines on stderr are written; `main` begins with words."""

    def __init__(self) -> None:
        self.as_json = False

    def line(self, text: str, about: Mapping[str, object]) -> str:
        """One line: the text with whatever came from outside made visible, or the object that holds it."""
        if not self.as_json:
            return visible(text)
        content = {"schema": PROGRESS_SCHEMA, "at": round(time.time(), 3), "type": "note", **about}
        return json.dumps(content | {"text": text}, default=str)  # in ASCII: a terminal obeys none of it


PROGRESS_SCHEMA = "klbench.progress/1"
VOICE = Voice()


def note(line: str, **about: object) -> None:
    """One line on stderr; `about` is what a machine gets to read with it."""
    with contextlib.suppress(OSError, ValueError):
        print(VOICE.line(line, about), file=sys.stderr, flush=True)


def ring(line: str) -> None:
    """One line and the terminal's bell, for work that took so long that nobody watches any more."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty() and not VOICE.as_json:
            sys.stderr.write("\a")
        note(line)


def show(error: KlbenchError) -> None:
    """The error as one line: what happened, why, what to do next."""
    said = " · ".join(part for part in (error.what, error.why, error.next) if part)
    note(f"klbench: {said}", type="error", **error.as_dict())


def known(error: KlbenchError, exit_code: ExitCode, arguments: Sequence[str]) -> int:
    """An error that a user can act on."""
    show(error)
    _write_error(arguments, error.as_dict())
    return exit_code


def usage(error: click.UsageError, arguments: Sequence[str]) -> int:
    """A command line that cannot be understood."""
    command = error.ctx.command_path if error.ctx is not None else "klbench"
    failure = {"what": error.format_message(), "why": "", "next": f"{command} --help"}
    note(f"klbench: {error.format_message()} · see {command} --help", type="error", **failure)
    _write_error(arguments, failure)
    return ExitCode.USAGE


def defect(error: Exception, arguments: Sequence[str]) -> int:
    """A defect of klbench: the traceback goes to a file."""
    what = f"klbench failed: {type(error).__name__}: {error}"
    where = _crash_file(error)
    failure = {"what": what, "why": "this is a defect of klbench", "next": f"report it with {where}"}
    note(f"{what} · please report it with {where}", type="error", **failure)
    _write_error(arguments, failure)
    return ExitCode.INTERNAL


def _crash_file(error: Exception) -> str:
    from klbench import paths
    from klbench.session.crash import write_crash

    with contextlib.suppress(KlbenchError, OSError):
        if (file := write_crash(paths.make_private(paths.home()), error)) is not None:
            return str(file)
    return "(no place to write the traceback)"


def _write_error(arguments: Sequence[str], error: dict[str, str]) -> None:
    """The JSON of a command that failed before it had a document of its own."""
    if (place := value_of("--json", arguments)) is not None:
        with contextlib.suppress(OSError, KlbenchError):
            write_json(place, {"error": error})


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """What a command line gives for an option of ours, the last time; it may not be understood as a whole."""
    before = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    found = None
    for index, argument in enumerate(before):
        if argument == option and index + 1 < len(before):
            found = before[index + 1]
        elif argument.startswith(f"{option}="):
            found = argument.partition("=")[2]
    return found


def write_json(place: str, document: object) -> None:
    """Writes one JSON object to the file, or to stdout for "-"."""
    import msgspec

    content = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    if place == "-":
        streams.write(content)
        return
    try:
        Path(place).write_bytes(content)
    except OSError as error:
        raise KlbenchError(f"cannot write {place}", why=error.strerror or str(error)) from error


__all__ = [
    "SIGNALS",
    "VOICE",
    "Interrupted",
    "SignalSwitch",
    "known",
    "note",
    "show",
    "signals_switched",
    "usage",
    "write_json",
]
