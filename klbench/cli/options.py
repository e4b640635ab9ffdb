"""Options that several commands share, and the request that they make.

sglang's own arguments follow `--`; they are split off before click looks, so that none of them can be taken
for one of ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from klbench.defaults import DEMO_MAX_NEW_TOKENS, DEMO_PROMPT_TOKENS, MAX_NEW_TOKENS, PROMPT_TOKENS
from klbench.errors import UsageError
from klbench.paths import why_not_writable

if TYPE_CHECKING:
    from klbench.session.request import StartRequest

Function = TypeVar("Function", bound=Callable[..., Any])

HELPERS = ("match", "prefill_cache_hit", "decode_cache_hit")
DEMO_MODELS = ("dense", "moe", "swa", "hybrid")
_SGLANG_ARGUMENTS = "klbench.sglang_arguments"


def checked_place(place: str | None) -> str | None:
    """Where the JSON goes; refused before the work, not behind it, where nothing can be written there."""
    if place is None or place == "-":
        return place
    if why := why_not_writable(Path(place)):
        raise UsageError(
            f"the JSON cannot be written to {place!r}", why=why, next="name a file, or - for stdout"
        )
    return place


class FiniteRange(click.FloatRange):
    """A range of numbers: click lets "nan" pass every bound, and infinity those that are open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number is not None and not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class TargetCommand(click.Command):
    """A command that takes sglang's arguments after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_SGLANG_ARGUMENTS] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- SGLANG_ARGUMENT...]"]


class DemoCommand(TargetCommand):
    """One that generates fewer tokens by default: its models are small, and so may the machine be."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for parameter in self.params:
            if parameter.name == "max_new_tokens":
                parameter.default = DEMO_MAX_NEW_TOKENS


def sglang_arguments() -> tuple[str, ...]:
    """What stood after `--` on this command line."""
    found: tuple[str, ...] = click.get_current_context().meta.get(_SGLANG_ARGUMENTS, ())
    return found


def _apply(options: Sequence[Callable[[Function], Function]]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


target_options = _apply(
    [
        click.option(
            "--demo",
            "demo",
            is_flag=False,
            flag_value="dense",
            default=None,
            metavar="[dense|moe|swa|hybrid]",
            help="The embedded server with a tiny model (dense when none is named).",
        ),
        click.option("--launch", "model_path", metavar="MODEL_PATH", help="Launch sglang with this model."),
        click.option("--url", metavar="URL", help="Attach to a running server."),
    ]
)

json_option = click.option(
    "--json",
    "json_place",
    metavar="PATH|-",
    callback=lambda _context, _parameter, place: checked_place(place),
    help="Write the result as one JSON object; with - to stdout, and nothing else there.",
)

progress_option = click.option(
    "--progress",
    type=click.Choice(("words", "json")),
    default="words",
    show_default=True,
    expose_value=False,  # `main` has read it: failures to read the rest are said that way, too
    help="How progress is said on stderr: in words, or as one JSON object a line.",
)

backend_option = click.option(
    "--backend",
    type=click.Choice(("digests", "dumper")),
    help="What captures: digests of every operator and of the state, or sglang's own dumper. Default: "
    "digests where the server carries klbench's plugin.",
)

path_map_option = click.option(
    "--path-map",
    "path_maps",
    multiple=True,
    metavar="SERVER=LOCAL",
    help="A folder of the server's and where it is seen here (container, other machine; repeatable).",
)

session_option = click.option(
    "--session",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The session's folder (default: a new one under the state folder).",
)

common_options = _apply(
    [
        click.option(
            "--helper",
            "helpers",
            multiple=True,
            type=click.Choice(HELPERS),
            help="Run only this helper (repeatable).",
        ),
        click.option(
            "--samples",
            type=click.IntRange(1, 65536),
            default=32,
            show_default=True,
            metavar="N",
            help="How many prompts.",
        ),
        click.option(
            "--max-new-tokens",
            type=click.IntRange(1),
            default=MAX_NEW_TOKENS,
            show_default=True,
            metavar="N",
            help="Tokens generated for each prompt.",
        ),
        click.option(
            "--prompt-tokens",
            type=click.IntRange(1),
            metavar="N",
            help="Length around which seeded prompts are made. "
            f"Default: {PROMPT_TOKENS}, demo: {DEMO_PROMPT_TOKENS}.",
        ),
        click.option(
            "--prompts", metavar="FILE|longbench", help="JSON lines with text or input_ids, or LongBench."
        ),
        click.option(
            "--seed",
            type=click.IntRange(0),
            default=1,
            show_default=True,
            metavar="S",
            help="Of seeded prompts.",
        ),
        click.option(
            "--threshold",
            type=FiniteRange(0),
            default=0.0,
            metavar="KL_NATS",
            help="The average KL must stay below it to count as clean. Default 0: every token bit-equal; "
            "sglang's gate is 1e-9.",
        ),
        click.option("--no-deterministic", is_flag=True, help="Launch without deterministic inference."),
        click.option(
            "--ready-to-capture/--no-ready-to-capture",
            default=None,
            help="Launch eager, so that capture needs no relaunch; or as it is served, with CUDA graphs. "
            "Default: eager for locate, census and demo.",
        ),
        click.option("--fault", metavar="NAME", help="Plant a fault (demo only); see demo --list-faults."),
        click.option(
            "--server-python", metavar="PATH", help="The Python that has sglang (default: the first found)."
        ),
        click.option("--api-key-env", metavar="NAME", help="Variable that holds the server's API key."),
        click.option("--admin-api-key-env", metavar="NAME", help="Variable that holds its admin API key."),
        click.option(
            "--launch-timeout",
            type=FiniteRange(1),
            default=3600.0,
            metavar="SECONDS",
            help="Limit for the server's start. Default: 60 minutes.",
        ),
        session_option,
        click.option(
            "--trace-dir",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="Where captures go (default: in the session).",
        ),
        click.option(
            "--keep-trace",
            is_flag=True,
            help="Keep also the tensors that were dumped; the trace is kept anyway.",
        ),
        path_map_option,
        click.option(
            "--yes-flush",
            is_flag=True,
            help="Agree that an attached server computes klbench's prompts and that its cache is flushed.",
        ),
        click.option(
            "--yes-capture",
            is_flag=True,
            help="Agree that a capture writes more than 10 GiB, or more than a quarter of what is free.",
        ),
        click.option(
            "--readonly", is_flag=True, help="Attach without flush, capture or dump: fresh prompts only."
        ),
        click.option(
            "--keep-idle",
            type=FiniteRange(0),
            default=1800.0,
            metavar="SECONDS",
            help="How long a runner without work and watchers keeps its server. Default: 30 minutes.",
        ),
        click.option("--notify", is_flag=True, help="Ring the terminal's bell when the work has ended."),
        progress_option,
    ]
)


def build_request(
    *,
    demo: str | None,
    model_path: str | None,
    url: str | None,
    ready_by_default: bool = False,
    **options: Any,
) -> StartRequest:
    """The request that the options make. Raises UsageError that says which of them do not fit."""
    from klbench.session.request import Options, StartRequest

    target = _target(demo, model_path, url)
    _check(target, options)
    fallback = DEMO_PROMPT_TOKENS if target.kind == "demo" else PROMPT_TOKENS
    prompts = options["prompts"]
    ready = ready_by_default if options["ready_to_capture"] is None else options["ready_to_capture"]
    return StartRequest(
        target=target,
        options=Options(
            helpers=tuple(dict.fromkeys(options["helpers"])),
            samples=_samples(target, options),
            max_new_tokens=options["max_new_tokens"],
            prompt_tokens=options["prompt_tokens"] or fallback,
            prompts=_absolute(prompts) if prompts not in (None, "longbench") else prompts,
            seed=options["seed"],
            threshold=options["threshold"],
            deterministic=not options["no_deterministic"],
            ready_to_capture=ready and target.kind != "url",
            fault=options["fault"],
            server_python=_python(options["server_python"]),
            api_key_env=options["api_key_env"],
            admin_api_key_env=options["admin_api_key_env"],
            launch_timeout_s=options["launch_timeout"],
            trace_dir=_trace_dir(options["trace_dir"]),
            keep_trace=options["keep_trace"],
            backend=options.get("backend"),
            path_maps=_path_maps(options["path_maps"]),
            yes_flush=options["yes_flush"],
            yes_capture=options["yes_capture"],
            readonly=options["readonly"],
            keep_idle_s=options["keep_idle"],
            notify=options["notify"],
        ),
    )


def _trace_dir(given: Path | None) -> str | None:
    """The folder, absolute. Raises UsageError before the work where none could be made there."""
    if given is None:
        return None
    place = Path(_absolute(given))
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(
            f"captures cannot go to {place}",
            why=f"{there} is no folder that may be written",
            next="name another folder with --trace-dir, or leave it out",
        )
    return str(place)


def _path_maps(given: Sequence[str]) -> tuple[str, ...]:
    from klbench.engine.path_map import read_path_map

    return read_path_map(given).spelled


def _target(demo: str | None, model_path: str | None, url: str | None) -> Any:
    from klbench.session.request import Target

    arguments = sglang_arguments()
    given = [name for name, value in (("--demo", demo), ("--launch", model_path), ("--url", url)) if value]
    if len(given) != 1:
        raise UsageError(
            "which server?" if not given else f"{' and '.join(given)} exclude each other",
            why="a target is one of --demo [MODEL], --launch MODEL_PATH, --url URL",
            next="klbench run --demo needs no GPU and no model",
        )
    if demo is not None:
        if demo not in DEMO_MODELS:
            raise UsageError(
                f"there is no demo model {demo!r}",
                why=f"there are: {', '.join(DEMO_MODELS)}",
                next="sglang's own arguments go after --",
            )
        return Target(kind="demo", model=demo, arguments=arguments)
    if model_path is not None:
        local = Path(model_path).expanduser()
        return Target(
            kind="launch",
            model_path=str(local.absolute()) if local.exists() else model_path,
            arguments=arguments,
        )
    if arguments:
        raise UsageError(
            "arguments after -- are for a server that klbench launches",
            why="an attached server runs already",
            next="leave them out, or use --launch",
        )
    from klbench.engine.address import server_address

    server_address(url or "")
    return Target(kind="url", url=url or "")


def _check(target: Any, options: dict[str, Any]) -> None:
    kind = target.kind
    if (fault := options["fault"]) is not None:
        if kind != "demo":
            raise UsageError(
                "--fault is for the demo only",
                why="a planted fault has no place in a server that somebody relies on",
                next=f"klbench run --demo --fault {fault}",
            )
        from klbench.engine.demo_faults import check_can_fire, checked_faults

        check_can_fire(
            checked_faults(fault, target.model),
            samples=_samples(target, options),
            new_tokens=options["max_new_tokens"],
            # How long the prompts of a file are is not known yet.
            tokens=1 << 20 if options["prompts"] else options["prompt_tokens"] or DEMO_PROMPT_TOKENS,
            helpers=options["helpers"],
        )
    if options["readonly"] and kind != "url":
        raise UsageError(
            "--readonly is for a server that runs already", next="leave it out, or attach with --url"
        )
    if kind == "url" and options["ready_to_capture"]:
        raise UsageError(
            "--ready-to-capture is for a server that klbench launches",
            why="an attached server captures only if it was started for it",
            next="klbench env prints what to put before its launch",
        )


def _samples(target: Any, options: dict[str, Any]) -> int:
    """How many prompts: as asked for, else by default as many as a planted fault needs to fire."""
    samples: int = options["samples"]
    source = click.get_current_context().get_parameter_source("samples")
    if options["fault"] is None or source is not click.core.ParameterSource.DEFAULT:
        return samples
    from klbench.engine.demo_faults import checked_faults, fitting_samples

    return fitting_samples(checked_faults(options["fault"], target.model), samples)


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


def _python(given: str | None) -> str | None:
    # A bare name is looked up in PATH later; resolving links would leave a virtual environment.
    return _absolute(given) if given is not None and "/" in given else given
