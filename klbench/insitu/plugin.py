"""The sglang plugin: tells klbench that it is there, opens the CPU engine, plants a fault, starts capture.

Inert unless `KLBENCH_INSITU_DIR` (a private control folder) and `KLBENCH_NONCE` are set, which only a launch
by klbench or its `env` command does. Each process in which it becomes active keeps one file in that folder,
`presence-<role>-<rank>-<pid>.json`, always complete:

    {"version": "0.1.0", "pid": 4711, "role": "scheduler", "rank": 0, "nonce": "a1b2",
     "stage": "model_loaded", "ranks": {"tp": 0, "pp": 0, "dp": 0, "global": 0},
     "hooks": ["cpu_engine.choices", "model_runner.load_model", "cpu_engine.batch_invariant_mode"],
     "faults": [{"name": "restore-key", "params": {"layer": 1, "back": 4}}], "error": null}

A process that has no rank (yet) writes `x` in the name and null in the file. sglang logs and swallows what a
plugin raises, so the traceback goes into `error` first, and is raised then. Without the presence of every
rank, with stage `model_loaded` and no error, klbench measures nothing.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from .private import check_private, file_mode

DISTRIBUTION = "klbench_insitu"
DIRECTORY_VARIABLE = "KLBENCH_INSITU_DIR"
NONCE_VARIABLE = "KLBENCH_NONCE"
CPU_ENGINE_VARIABLE = "KLBENCH_CPU_ENGINE"
FAULT_VARIABLE = "KLBENCH_FAULT"
FAULT_LAB_VARIABLE = "KLBENCH_FAULT_LAB"

_ROLES = {
    "run_scheduler_process": "scheduler",
    "run_detokenizer_process": "detokenizer",
    "run_data_parallel_controller_process": "dp_controller",
}


def write_json_atomically(path: Path, content: Any) -> None:
    """Writes `content` to `path` so that a reader sees the old file or the new one, never a part."""
    handle, draft = tempfile.mkstemp(prefix=".draft-", dir=str(path.parent))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, file_mode(path.parent))
            json.dump(content, file)
        os.replace(draft, str(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


class Presence:
    """This process's presence file. Safe to update from any thread; every update is written at once."""

    def __init__(self, control_dir: Path, nonce: str, role: str, version: Optional[str]) -> None:
        self._control_dir = control_dir
        self._lock = threading.RLock()
        self._path: Optional[Path] = None
        self._content: Dict[str, Any] = {
            "version": version,
            "pid": os.getpid(),
            "role": role,
            "rank": None,
            "ranks": None,
            "nonce": nonce,
            "stage": "activated",
            "hooks": [],
            "faults": [],
            "error": None,
        }

    def update(self, **fields: Any) -> None:
        """Sets fields of the presence and writes it."""
        with self._lock:
            self._content.update(fields)
            self._write()

    def add_hooks(self, *names: str) -> None:
        """Adds hooks that took effect, each once."""
        with self._lock:
            hooks: List[str] = self._content["hooks"]
            hooks.extend(name for name in names if name not in hooks)
            self._write()

    def fail(self, error: BaseException) -> None:
        """Records the traceback of an exception; the first one is kept, for the later ones follow from it."""
        with self._lock:
            if self._content["error"] is None:
                self._content["error"] = "".join(
                    traceback.format_exception(type(error), error, error.__traceback__)
                )
            self._write()

    def _write(self) -> None:
        rank = self._content["rank"]
        name = "presence-{role}-{rank}-{pid}.json".format(
            role=self._content["role"], rank="x" if rank is None else rank, pid=self._content["pid"]
        )
        path = self._control_dir / name
        write_json_atomically(path, self._content)
        if self._path is not None and self._path != path:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._path = path


class Context:
    """What the parts of the plugin share within one process.

    `role` is "launcher", "scheduler", "detokenizer", "dp_controller" or "worker" (unknown to us). Functions
    given to `when_model_is_loaded` are called once per process with (model_runner, context), in order, after
    the target model has its weights; `rank` is set by then.
    """

    def __init__(self, control_dir: Path, nonce: str, role: str, presence: Presence) -> None:
        self.control_dir = control_dir
        self.nonce = nonce
        self.role = role
        self.presence = presence
        self.rank: Optional[int] = None
        self._after_load: List[Callable[[Any, "Context"], None]] = []

    @property
    def may_hold_a_model(self) -> bool:
        """Whether this process may load a model: only there are sglang's model modules imported anyway."""
        return self.role in ("scheduler", "worker")

    def when_model_is_loaded(self, function: Callable[[Any, "Context"], None]) -> None:
        """Asks for `function(model_runner, context)` once the model is loaded."""
        self._after_load.append(function)

    def model_is_loaded(self, model_runner: Any) -> None:
        """Publishes the rank and runs what waited for the model."""
        ranks = _ranks(model_runner)
        self.rank = ranks["global"]
        try:
            for function in self._after_load:
                function(model_runner, self)
        except Exception as error:
            self.presence.update(rank=self.rank, ranks=ranks)
            self.presence.fail(error)
            raise
        self.presence.add_hooks("model_runner.load_model")
        self.presence.update(rank=self.rank, ranks=ranks, stage="model_loaded")


def _ranks(model_runner: Any) -> Dict[str, int]:
    """This process's place: along each axis, and "global" over all of them.

    0.5.17 hands the parallel state to the runner as `ps`; 0.5.23 keeps it in the runtime context.
    """
    from sglang.srt.runtime_context import get_parallel
    from torch import distributed

    parallel = getattr(model_runner, "ps", None) or get_parallel()
    ranks = {name: int(getattr(parallel, f"{name}_rank", None) or 0) for name in ("tp", "pp", "dp")}
    in_world, world_size = 0, 1
    if distributed.is_available() and distributed.is_initialized():
        in_world, world_size = distributed.get_rank(), distributed.get_world_size()
    # Replicas are worlds of their own; the ranks of data-parallel attention share one.
    replicas = not getattr(get_parallel(), "enable_dp_attention", False)
    ranks["global"] = in_world + (world_size * ranks["dp"] if replicas else 0)
    return ranks


def _role() -> str:
    """What this process is to sglang, told by the function that loads the plugins."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        role = _ROLES.get(frame.f_code.co_name)
        if role is not None:
            return role
        frame = frame.f_back
    return "launcher" if multiprocessing.parent_process() is None else "worker"


def _control_dir(text: str) -> Path:
    """The control folder, refused unless it is ours alone: its content decides what we do."""
    path = Path(text)
    check_private(path)
    return path


def _version() -> Optional[str]:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hook_model_load(context: Context) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_load(result: Any, model_runner: Any, *_: Any, **__: Any) -> Any:
        if not getattr(model_runner, "is_draft_worker", False):
            context.model_is_loaded(model_runner)
        return result

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", after_load, HookType.AFTER
    )


def _install(context: Context) -> None:
    if os.environ.get(CPU_ENGINE_VARIABLE) == "1":
        from . import cpu_engine

        cpu_engine.install(context)
    fault, lab = os.environ.get(FAULT_VARIABLE), os.environ.get(FAULT_LAB_VARIABLE) == "1"
    if fault or lab:
        from . import faults_catalogue

        armed = faults_catalogue.parse_faults(fault) if fault else ()
        if context.may_hold_a_model:
            from . import faults

            faults.install(context, armed, lab)
    # Parts of their own that a trimmed copy may lack; if they are there, their errors are errors.
    for part in (".capture", ".replay"):
        if importlib.util.find_spec(part, __package__) is not None:
            importlib.import_module(part, __package__).install(context)
    if context.may_hold_a_model:
        _hook_model_load(context)


def activate() -> None:
    """The entry point that sglang calls in each of its processes."""
    directory, nonce = os.environ.get(DIRECTORY_VARIABLE), os.environ.get(NONCE_VARIABLE)
    if not directory or not nonce:
        return
    control_dir = _control_dir(directory)
    role = _role()
    presence = Presence(control_dir, nonce, role, _version())
    presence.update()
    try:
        from . import secret_in_logs

        secret_in_logs.install(control_dir)
        _install(Context(control_dir, nonce, role, presence))
    except Exception as error:
        presence.fail(error)
        raise
