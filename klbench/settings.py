"""What a user may set once: a TOML file, environment variables, and the few things that klbench remembers.

    $ klbench config show
    workbench.theme       dark     default
    run.server_python     /opt/…   KLBENCH_SERVER_PYTHON

Later wins: default, remembered (a theme chosen by key), file, environment, command line. Strict: a key or a
value that is not understood is an error with the nearest key there is, never ignored. Standard library only,
for `klbench --version` comes by here.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench import paths
from klbench.errors import UsageError

Value = bool | int | float | str

MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set: `read` makes a value of text or of TOML's value, or raises ValueError."""

    key: str
    """table.name in the file."""
    default: Value | None
    help: str
    read: Callable[[object], Value]

    @property
    def variable(self) -> str:
        return "KLBENCH_" + self.key.rpartition(".")[2].upper()


@dataclass(frozen=True, slots=True)
class Set:
    """A setting's value and where it comes from."""

    setting: Setting
    value: Value | None
    origin: str
    """default, remembered, the file's path, the variable's name, or the command line's flag."""


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


def _number(least: float, whole: bool) -> Callable[[object], Value]:
    def read(value: object) -> Value:
        kind = f"{'a whole number' if whole else 'a number'} from {least:g} on"
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(kind)
        try:
            number = int(value) if whole and not isinstance(value, float) else float(value)
        except ValueError:
            raise ValueError(kind) from None
        if not number >= least or (whole and number != int(number)):
            raise ValueError(kind)
        return int(number) if whole else number

    return read


def _one_of(*words: str) -> Callable[[object], Value]:
    def read(value: object) -> Value:
        if not isinstance(value, str) or value not in words:
            near = difflib.get_close_matches(str(value), words, 1)
            raise ValueError(f"one of {', '.join(words)}" + (f"; did you mean {near[0]}?" if near else ""))
        return value

    return read


def _text(value: object) -> Value:
    if not isinstance(value, str) or not value.strip() or "\x00" in value:
        raise ValueError("a text that is not empty")
    return value


SETTINGS: tuple[Setting, ...] = (
    Setting("workbench.theme", "dark", "Colours: dark or light. A key changes and remembers it.",
            _one_of("dark", "light")),
    Setting("workbench.compact", False, "More rows: no lower borders, one statement, one line of the guide. "
            "A key changes and remembers it.", _switch),
    Setting("workbench.ascii", "auto", "Draw with ASCII characters only: on, off, or auto: where the locale "
            "is not UTF-8.", _one_of("auto", "on", "off")),
    Setting("workbench.plain", False, "Lines of words instead of screens, commands typed by their names: for "
            "screen readers.", _switch),
    Setting("workbench.slow_link", False, "Send as little as possible: 16 colours, ten pictures a second at "
            "most, no mouse.", _switch),
    Setting("workbench.mouse", True, "Take the mouse; without, the terminal selects text itself.", _switch),
    Setting("run.samples", 32, "How many prompts.", _number(1, True)),
    Setting("run.seed", 1, "Of seeded prompts.", _number(0, True)),
    Setting("run.threshold", 0.0, "The average KL in nats must stay below it to count as clean; 0: every "
            "token bit-equal.", _number(0, False)),
    Setting("run.server_python", None, "The Python that has sglang.", _text),
    Setting("run.api_key_env", None, "Variable that holds the server's API key.", _text),
    Setting("run.admin_api_key_env", None, "Variable that holds its admin API key.", _text),
    Setting("run.launch_timeout", 3600.0, "Limit for the server's start in seconds.", _number(1, False)),
    Setting("run.keep_idle", 1800.0, "How long a runner without work and watchers keeps its server, in "
            "seconds.", _number(0, False)),
    Setting("run.trace_dir", None, "Where captures go: fast scratch of this machine.", _text),
    Setting("run.notify", False, "Ring the terminal's bell when long work has ended.", _switch),
)  # fmt: skip
BY_KEY = {setting.key: setting for setting in SETTINGS}
RUN_OPTIONS = tuple(setting.key.partition(".")[2] for setting in SETTINGS if setting.key.startswith("run."))

OTHER_VARIABLES = {
    "KLBENCH_HOME": "Where sessions and what is remembered are kept, instead of the user's state folder.",
    "KLBENCH_CACHE": "Where the demo's models are kept, instead of the user's cache folder.",
    "KLBENCH_CONFIG": "The configuration file, instead of the one in the user's configuration folder.",
    "KLBENCH_SERVER_KEY": "Whether a launched server asks for a key that klbench made: always, never, or "
    "auto: where others have processes on the machine.",
}
"""Variables that are no settings."""


class Settings(Mapping[str, Value | None]):
    """All settings by key; `of(key)` also says where the value comes from."""

    def __init__(
        self, found: Mapping[str, Set], bound: Mapping[str, tuple[str, ...]] | None = None, file: str = ""
    ) -> None:
        self._found = dict(found)
        self.bound = dict(bound or {})
        """Keys by the action's id, as they were written; the workbench checks them (tui/keymap.py)."""
        self.file = file
        """Where they were read."""

    def __getitem__(self, key: str) -> Value | None:
        return self._found[key].value

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def of(self, key: str) -> Set:
        return self._found[key]

    def with_flags(self, flags: Mapping[str, Value]) -> Settings:
        """The same with what the command line says, by key."""
        given = {
            key: Set(BY_KEY[key], value, f"--{key.rpartition('.')[2].replace('_', '-')}")
            for key, value in flags.items()
        }
        return Settings(self._found | given, self.bound, self.file)

    def run_defaults(self) -> dict[str, Value]:
        """What was set for runs, by the option's name; nothing that was not set."""
        return {
            name: found.value
            for name in RUN_OPTIONS
            if (found := self._found[f"run.{name}"]).origin != "default" and found.value is not None
        }


def config_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the file is read from: $KLBENCH_CONFIG, else the user's configuration folder."""
    if given := environment.get("KLBENCH_CONFIG"):
        return Path(given).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_config_dir("klbench")) / "config.toml"


def load(environment: Mapping[str, str] = os.environ, file: Path | None = None) -> Settings:
    """The settings in force. Raises UsageError that names every key and value that is not understood."""
    file = config_file(environment) if file is None else file
    found = {setting.key: Set(setting, setting.default, "default") for setting in SETTINGS}
    kept = remembered()
    theme = kept.get("theme")
    if theme in ("dark", "light"):
        found["workbench.theme"] = Set(BY_KEY["workbench.theme"], str(theme), "remembered")
    if isinstance(compact := kept.get("compact"), bool):
        found["workbench.compact"] = Set(BY_KEY["workbench.compact"], compact, "remembered")
    wrong: list[str] = []
    values, bound = _in_file(file, wrong)
    for key, value in values.items():
        _take(found, key, value, str(file), f"{file.name}, {key}", wrong)
    by_variable = {setting.variable: setting.key for setting in SETTINGS}
    for name, text in sorted(environment.items()):
        if name in by_variable and text:
            _take(found, by_variable[name], text, name, name, wrong)
        elif name.startswith("KLBENCH_") and name not in OTHER_VARIABLES and name not in by_variable:
            # Only what makes them different is compared: all begin alike.
            ends = [one.removeprefix("KLBENCH_") for one in (*by_variable, *OTHER_VARIABLES)]
            near = difflib.get_close_matches(name.removeprefix("KLBENCH_"), ends, 1, 0.75)
            # Others' variables may begin like ours; one that is nearly ours was meant to be it.
            wrong += [f"{name}: no variable of klbench; did you mean KLBENCH_{near[0]}?"] if near else []
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(
            f"the configuration is not understood: {wrong[0]}{more}",
            why="; ".join(wrong[1:6]),
            next=f"klbench config example shows every key; the file is {file}",
        )
    return Settings(found, bound, str(file))


def _take(found: dict[str, Set], key: str, value: object, origin: str, place: str, wrong: list[str]) -> None:
    setting = BY_KEY[key]
    try:
        found[key] = Set(setting, setting.read(value), origin)
    except ValueError as error:
        wrong.append(f"{place} is {value!r}, it takes {error}")


_Bound = dict[str, tuple[str, ...]]


def _in_file(file: Path, wrong: list[str]) -> tuple[dict[str, object], _Bound]:
    """What the file sets, by key, and the keys of actions; none where there is no file."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES} bytes")
        tables = tomllib.loads(content.decode("utf-8"))
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError, RecursionError) as error:
        wrong.append(f"{file}: {getattr(error, 'strerror', None) or error}")
        return {}, {}
    values: dict[str, object] = {}
    bound: _Bound = {}
    for table, content_of in tables.items():
        if not isinstance(content_of, dict):
            wrong.append(f"{file.name}, {table}: {_unknown(table, [*BY_KEY])}")
            continue
        for name, value in content_of.items():
            key = f"{table}.{name}"
            if table == "keys":
                texts = [value] if isinstance(value, str) else value
                if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
                    bound[name] = tuple(texts)
                else:
                    wrong.append(f"{file.name}, {key} is {value!r}, it takes a key or a list of keys")
            elif key in BY_KEY:
                values[key] = value
            else:
                wrong.append(f"{file.name}, {key}: {_unknown(key, [*BY_KEY])}")
    return values, bound


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1, 0.4)
    near = near or [one for one in known if one.rpartition(".")[2] == key.rpartition(".")[2]]
    return "there is no such key" + (f"; did you mean {near[0]}?" if near else "")


def in_file(value: Value | None) -> str:
    """A value as the file has it."""
    return json.dumps(value) if value is not None else '""'


def example() -> str:
    """A file with every key, commented out, at its default."""
    lines: list[str] = ["# klbench reads this from the path that `klbench config path` prints."]
    table = ""
    for setting in SETTINGS:
        where, _, name = setting.key.partition(".")
        if where != table:
            table = where
            lines += ["", f"[{table}]"]
        lines += [f"# {setting.help} ({setting.variable})", f"# {name} = {in_file(setting.default)}"]
    lines += ["", "[keys]", "# Other keys for actions of the workbench; klbench help keys names them.",
              '# locate = "o"', '# pane_1 = ["1", "f2"]']  # fmt: skip
    return "\n".join(lines) + "\n"


# What is remembered without being asked: small, and never an error.


def _remembered_file() -> Path:
    return paths.home() / "remembered.json"


def remembered() -> dict[str, Any]:
    """What was remembered; nothing where there is none or it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = _remembered_file().read_bytes()[:MOST_BYTES]
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    return {}


def remember(name: str, value: Value) -> None:
    """Keeps one thing; a disk that refuses changes nothing else."""
    with contextlib.suppress(OSError, UsageError):
        file = paths.make_private(paths.home()) / _remembered_file().name
        handle, draft = tempfile.mkstemp(prefix=".remembered-", dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as output:
            json.dump(remembered() | {name: value}, output)
        os.replace(draft, file)
