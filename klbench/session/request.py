"""What a user asks for: a target and options, as the command line, the start screen and a runner share them.

    {"target": {"kind": "demo", "model": "dense", "arguments": []}, "options": {"samples": 32, ...}}

Invariants: paths are absolute, so that a runner may live in another folder; no secret is in here, only the
names of environment variables that hold one; what is written to a session has the keys in the server's own
arguments masked (`as_shown`).
"""

from __future__ import annotations

import shlex
from typing import Any, Literal

import msgspec

from klbench.defaults import DEMO_PROMPT_TOKENS, MAX_NEW_TOKENS, PROMPT_TOKENS
from klbench.errors import UsageError

MAX_REQUEST_BYTES = 1024 * 1024

_SECRET_ARGUMENTS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password", "--hf-token")


class Target(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The server to work on."""

    kind: Literal["demo", "launch", "url"]
    model: str = ""
    """demo: the zoo model."""
    model_path: str = ""
    """launch: what sglang takes as --model-path."""
    url: str = ""
    arguments: tuple[str, ...] = ()
    """demo and launch: the user's own sglang arguments; they win over ours."""

    @property
    def label(self) -> str:
        """A short name for folders and lists; untrusted text."""
        match self.kind:
            case "demo":
                return f"demo-{self.model}"
            case "launch":
                return self.model_path.rstrip("/").rpartition("/")[2]
            case "url":
                return self.url.rpartition("//")[2].partition("/")[0].rpartition("@")[2]

    def on_command_line(self) -> list[str]:
        """The arguments that name this target to `klbench run`; the sglang arguments come last."""
        after = ["--", *masked_arguments(self.arguments)] if self.arguments else []
        match self.kind:
            case "demo":
                return ["--demo", self.model, *after]
            case "launch":
                return ["--launch", self.model_path, *after]
            case "url":
                return ["--url", self.url]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to work on it. Field names are the command line's, defaults are design's."""

    helpers: tuple[str, ...] = ()
    """Empty for all three."""
    samples: int = 32
    max_new_tokens: int = MAX_NEW_TOKENS
    prompt_tokens: int = PROMPT_TOKENS
    prompts: str | None = None
    """A file of prompts, "longbench", or None for seeded ones."""
    seed: int = 1
    threshold: float = 0.0
    """Largest avg_kl_div in nats that counts as clean; 0 means bit-equal."""
    deterministic: bool = True
    ready_to_capture: bool = False
    fault: str | None = None
    server_python: str | None = None
    api_key_env: str | None = None
    admin_api_key_env: str | None = None
    launch_timeout_s: float = 3600.0
    trace_dir: str | None = None
    keep_trace: bool = False
    backend: Literal["digests", "dumper"] | None = None
    """Which back end captures; None for digests where the server can, else the dumper."""
    path_maps: tuple[str, ...] = ()
    """SERVER=LOCAL: folders of the server's file system and where klbench sees them."""
    yes_flush: bool = False
    """The user agreed beforehand that an attached server's cache is flushed."""
    yes_capture: bool = False
    """The user agreed beforehand to a capture that writes much (forecasting.py)."""
    readonly: bool = False
    """An attached server is only asked to generate and to score: never flushed, traced or reconfigured."""
    keep_idle_s: float = 1800.0
    """A detached runner with nothing to do and nobody attached ends after this."""
    notify: bool = False
    """Ring the terminal's bell when long work ends."""


class StartRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What starts a session."""

    target: Target
    options: Options = Options()

    def as_shown(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Target and options as they may be written down and shown, without keys."""
        target = msgspec.structs.replace(
            self.target,
            arguments=tuple(masked_arguments(self.target.arguments)),
            url=_without_password(self.target.url),
        )
        return _as_json(target), _as_json(self.options)

    def command_line(self, command: str = "run", *more: str) -> str:
        """The `klbench` command that repeats this request; untrusted text, quoted for a shell."""
        options = self.options
        default = Options(prompt_tokens=DEMO_PROMPT_TOKENS if self.target.kind == "demo" else PROMPT_TOKENS)
        words = ["klbench", command]
        for helper in options.helpers:
            words += ["--helper", helper]
        for name, flag in (
            ("samples", "--samples"),
            ("max_new_tokens", "--max-new-tokens"),
            ("prompt_tokens", "--prompt-tokens"),
            ("prompts", "--prompts"),
            ("seed", "--seed"),
            ("threshold", "--threshold"),
            ("fault", "--fault"),
            ("server_python", "--server-python"),
            ("api_key_env", "--api-key-env"),
            ("admin_api_key_env", "--admin-api-key-env"),
            *((("backend", "--backend"),) if command == "locate" else ()),
        ):
            value = getattr(options, name)
            if value is not None and value != getattr(default, name):
                words += [flag, str(value)]
        for pair in options.path_maps:
            words += ["--path-map", pair]
        words += [] if options.deterministic else ["--no-deterministic"]
        words += ["--ready-to-capture"] if options.ready_to_capture and command != "locate" else []
        words += ["--yes-flush"] if options.yes_flush else []
        words += ["--yes-capture"] if options.yes_capture else []
        words += ["--readonly"] if options.readonly else []
        return shlex.join([*words, *more, *self.target.on_command_line()])


def _as_json(struct: msgspec.Struct) -> dict[str, Any]:
    """What a reader of the log will see: lists, no tuples."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(struct))
    return plain


def decode_start(content: bytes) -> StartRequest:
    """The request that another process of klbench sent. Raises UsageError."""
    try:
        return msgspec.json.decode(content[:MAX_REQUEST_BYTES], type=StartRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("cannot read what to start", why=str(error)) from error


def start_from_dict(start: dict[str, Any]) -> StartRequest:
    """The request in `{"target": {...}, "options": {...}}`. Raises UsageError."""
    try:
        return msgspec.convert(start, StartRequest)
    except msgspec.ValidationError as error:
        raise UsageError("cannot understand what to start", why=str(error)) from error


def masked_arguments(arguments: tuple[str, ...]) -> list[str]:
    """sglang arguments with the values of keys replaced by ***."""
    shown: list[str] = []
    for index, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if equals and name in _SECRET_ARGUMENTS:
            shown.append(f"{name}=***")
        elif index and arguments[index - 1] in _SECRET_ARGUMENTS:
            shown.append("***")
        else:
            shown.append(argument)
    return shown


def _without_password(url: str) -> str:
    head, at, rest = url.rpartition("@")
    return f"{head.partition('://')[0]}://***@{rest}" if at and "://" in head else url
