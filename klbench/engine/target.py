"""From what the user wants to a launch: which Python, device, flags and environment, and why.

    Demo("dense")                         a model of the zoo, on a free GPU or on the CPU
    Launch("/models/qwen3")               any model; the user's own sglang arguments always win over ours

Flags that depend on the installed sglang are asked of it, never assumed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klbench.engine.cpu_ranks import rank_cores
from klbench.engine.demo_faults import Needed, checked_faults, needed_by
from klbench.engine.facts import parse_arguments
from klbench.engine.gpu import Gpu, choose_for_demo, list_gpus, visible_gpus
from klbench.engine.process import LaunchSpec, free_port, port_holder
from klbench.engine.pythonpath import cpu_launch_flags, plugin_environment
from klbench.engine.server_key import make_key
from klbench.engine.server_python import Flags, ServerPython, find_server_python, server_flags
from klbench.errors import ServerError, UsageError
from klbench.zoo import Kind, make_model, zoo_root

DETERMINISTIC = "--enable-deterministic-inference"
_GPU_DEMO_POOL = ("--max-total-tokens", "65536", "--mem-fraction-static", "0.3")
_PATIENT_WATCHDOG = ("--watchdog-timeout", "1800")
"""For servers that are captured: sglang ends a server whose forward takes more than 300 s, and one that a
dumper writes whole prefills of can take longer. As long as klbench itself waits for one that stands still."""


@dataclass(frozen=True, slots=True)
class Demo:
    """The embedded server: a model of the zoo."""

    model: Kind = "dense"


@dataclass(frozen=True, slots=True)
class Launch:
    """A server of ours on a model of the user's."""

    model_path: str


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to start it. `arguments` are the user's own sglang arguments."""

    arguments: tuple[str, ...] = ()
    deterministic: bool = True
    ready_to_capture: bool = False
    fault: str | None = None
    fault_lab: bool = False
    """Faults may be armed while it runs; a demo only."""
    environment: tuple[tuple[str, str], ...] = ()
    """More variables for the server."""
    server_python: Path | None = None
    attention_backend: str | None = None
    """Ours, where the default turned out not to do; the user's own argument still wins."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch that is ready to be started, and what a user should know about it."""

    spec: LaunchSpec
    python: ServerPython
    url: str
    cpu: bool
    is_demo: bool
    gpus: tuple[Gpu, ...]
    api_key: str | None
    admin_api_key: str | None
    ours: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


async def plan_launch(
    target: Demo | Launch,
    options: LaunchOptions,
    *,
    log: Path,
    control_dir: Path,
    environment: Mapping[str, str] | None = None,
) -> Plan:
    """Decides everything about a launch without starting it. Raises KlbenchError for what cannot be started.

    `control_dir` must exist with mode 0700 and be empty: what the plugin writes goes there.
    """
    environment = dict(os.environ if environment is None else environment) | dict(options.environment)
    if (options.fault is not None or options.fault_lab) and not isinstance(target, Demo):
        raise UsageError("faults are planted in the demo only", next="use --demo with --fault")
    needed = Needed()
    if options.fault is not None and isinstance(target, Demo):
        needed = needed_by(checked_faults(options.fault, target.model))
        environment = dict(needed.environment) | environment
    python = await find_server_python(options.server_python, environment)
    users = parse_arguments(options.arguments)
    gpus = visible_gpus(await list_gpus(), environment)
    notes = [f"server Python: {python.sentence}"]
    if isinstance(target, Demo):
        gpus, more = _demo_device(users, gpus, environment)
        notes += more
        on_gpu = bool(gpus) and users.get("--device") != "cpu"
        model_path = str(make_model(target.model, zoo_root(), on_gpu=on_gpu))
    else:
        model_path = _checked_model_path(target.model_path, environment)
    device = users.get("--device")
    cpu = device == "cpu" if device is not None else not gpus
    if cpu:
        environment |= rank_cores(users, environment)
    ours = await _our_flags(target, options, python, environment, users=users, cpu=cpu)
    ours += needed.arguments
    if needed != Needed():
        words = [*needed.arguments, *(f"{name}={value}" for name, value in needed.environment)]
        notes.append(f"fault {options.fault} needs {' '.join(words)}")
    port, url = _address(users)
    if "--port" not in users:
        ours += ["--port", str(port)]
    if (key := make_key(control_dir, users, environment)) is not None:
        ours += key.flags
        notes.append(key.note)
    arguments = ("--model-path", model_path, *_without(ours, users), *options.arguments)
    nonce = secrets.token_hex(4)
    return Plan(
        spec=LaunchSpec(
            python=python.path,
            arguments=arguments,
            environment=plugin_environment(
                control_dir,
                nonce,
                cpu=cpu,
                fault=options.fault,
                fault_lab=options.fault_lab,
                base_env=environment,
                offline=isinstance(target, Demo),
            ),
            log=log,
            control_dir=control_dir,
            nonce=nonce,
        ),
        python=python,
        url=url,
        cpu=cpu,
        is_demo=isinstance(target, Demo),
        gpus=() if cpu else tuple(gpus),
        api_key=key.value if key is not None else users.get("--api-key"),
        admin_api_key=users.get("--admin-api-key"),
        ours=tuple(ours),
        notes=tuple(notes),
    )


def _demo_device(
    users: Mapping[str, str | None], visible: Sequence[Gpu], environment: dict[str, str]
) -> tuple[list[Gpu], list[str]]:
    """The demo's one GPU, made the only visible one, or none; and what to say about it."""
    if "--device" in users or "--base-gpu-id" in users:
        return list(visible), ["the device was chosen by your own arguments"]
    choice = choose_for_demo(visible)
    if choice.gpu is None:
        return [], list(choice.notes)
    # Named as the user names devices: an index stays an index.
    by_uuid = "GPU-" in environment.get("CUDA_VISIBLE_DEVICES", "")
    environment["CUDA_VISIBLE_DEVICES"] = choice.gpu.uuid if by_uuid else str(choice.gpu.index)
    return [choice.gpu], [*choice.notes, f"the demo runs on {choice.gpu.sentence}"]


def _checked_model_path(model_path: str, environment: Mapping[str, str]) -> str:
    """The model's path as the server will find it; a name on a hub is left as it is.

    Raises UsageError for a folder that holds no model, and for a name that could only come from a hub which
    the server is told not to ask.
    """
    path = Path(model_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.json")):
            raise UsageError(f"{path} holds no model", why="it has no config.json")
        return str(path.absolute())
    looks_local = model_path.startswith(("/", ".", "~")) or model_path.count("/") > 1
    if looks_local and not path.exists():
        raise UsageError(f"there is no model at {path}", next="give the folder that holds its config.json")
    if not looks_local and not path.exists():
        _check_offline(model_path, environment)
    return str(path) if looks_local else model_path


def _check_offline(name: str, environment: Mapping[str, str]) -> None:
    """Raises UsageError where the hub may not be asked and its cache does not hold the model."""
    switches = [
        switch
        for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if environment.get(switch, "").upper() in ("1", "ON", "YES", "TRUE")
    ]
    if not switches:
        return
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    if not any(snapshots.glob("*/config.json")):
        raise UsageError(
            f"the model {name} is not on this machine, and its hub may not be asked",
            why=f"{switches[0]} is set and {snapshots} holds no config.json",
            next="give the model's folder to --launch, or download it where the network is",
        )


def _address(users: Mapping[str, str | None]) -> tuple[int, str]:
    """(port, URL) of the server to be. Raises ServerError if the user's port is taken."""
    host = users.get("--host") or "127.0.0.1"
    reach = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    given = users.get("--port")
    if given is None:
        port = free_port()
    else:
        if not given.isdigit() or not 0 < int(given) < 65536:
            raise UsageError(f"--port {given} is no port")
        port = int(given)
        holder = port_holder(port)
        if holder is not None:
            raise ServerError(
                f"port {port} is taken by {holder}",
                next="leave --port out: klbench finds a free one",
            )
    return port, f"http://{reach}:{port}"


async def _our_flags(
    target: Demo | Launch,
    options: LaunchOptions,
    python: ServerPython,
    environment: Mapping[str, str],
    *,
    users: Mapping[str, str | None],
    cpu: bool,
) -> list[str]:
    ours = ["--host", "127.0.0.1"]
    if cpu:
        ours += cpu_launch_flags()
        # An idle scheduler polls without a pause: measured 97 % of a core, 1 % with this.
        ours += ["--sleep-on-idle", *_PATIENT_WATCHDOG]
    elif isinstance(target, Demo):
        ours += _GPU_DEMO_POOL
    if options.attention_backend is not None:
        ours += ["--attention-backend", options.attention_backend]
    if options.deterministic:
        ours.append(DETERMINISTIC)
    if target == Demo("hybrid"):
        # sglang's own number of state slots took 2 GB for this model.
        ours += ["--max-mamba-cache-size", "256"]
    if isinstance(target, Demo):
        # A small model decodes a step in milliseconds: a line per 8 steps shows that it moves.
        ours += ["--decode-log-interval", "8"]
    if options.ready_to_capture and not cpu:
        flags = await server_flags(python, environment)
        ours += eager_flags(flags, users)
        if "--sleep-on-idle" in flags:
            # A scheduler that polls holds the interpreter, and the trace is written by a thread of its own:
            # measured on an H200, 43 s for a trace of 7 MB.
            ours.append("--sleep-on-idle")
        if _PATIENT_WATCHDOG[0] in flags:
            ours += _PATIENT_WATCHDOG
    return ours


def eager_flags(flags: Flags, users: Mapping[str, str | None] | None = None) -> list[str]:
    """The flags that make every forward eager, as this sglang spells them. Raises ServerError without any."""
    users = users or {}
    if flags.takes("--cuda-graph-backend-decode", "disabled") and flags.takes(
        "--cuda-graph-backend-prefill", "disabled"
    ):
        eager = ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    elif "--disable-cuda-graph" in flags:
        eager = ["--disable-cuda-graph"]
        eager += [
            option
            for option in ("--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph")
            if option in flags
        ]
    else:
        raise ServerError(
            "this sglang does not say how CUDA graphs are switched off",
            why="none of the options that klbench knows is there",
            next="add the options yourself, after --",
        )
    return _without(eager, users)


def _without(ours: Sequence[str], users: Mapping[str, str | None]) -> list[str]:
    """Our arguments less those that the user gives."""
    kept: list[str] = []
    keep = True
    for argument in ours:
        if argument.startswith("--"):
            keep = argument not in users
        if keep:
            kept.append(argument)
    return kept
