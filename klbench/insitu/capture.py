"""Layer capture inside the server, for the forwards that hold an armed request; by one of three back ends.

Always on, and cheap: the composition of each forward with a request of ours (composition.py). On request: the
tensors of every module, for exactly the forwards that hold an armed id (rids.py), with their whole batch.

What cannot ride in an id is asked for in `capture-control.json` in the control folder, which a thread of each
rank reads, also when the server is idle, and answers in `capture-ack-<rank>.json`:

    {"seq": 3, "nonce": "a1b2", "capture": {"folder": "/scratch/t1", "backend": "digest", "filter": null,
                                            "free_floor_bytes": 2000000000, "size_cap_bytes": 50000000000}}
    {"seq": 3, "nonce": "a1b2", "rank": 0, "ok": true, "error": null, "free_bytes": 75161927680}

With capture null it is closed; while that takes long the answer has "working": 1, 2, ... and is none yet.
Into the capture folder each rank writes `ready-<rank>.json` (the same nonce: proof that both sides see one
folder). The back ends "digest" (digest_capture.py) and "state" (state_probe.py, without hooks) write the
trace themselves, which is complete when closing is acknowledged. Back end "dumper" (the default) writes
`modules-<rank>.json`, the parameters that recurrences are recomputed with (parameters.py), and for each
captured forward the folder `rank<rank>-<forward>/` with the dumper's files and `forward.json`. The first
thing that goes wrong, in our code or on the disk, stands in `invalid-<rank>.json`: capture is off from then
on and the server goes on.

The dumper is used without its port: `DUMPER_SERVER_PORT` stays unset, hooks are registered in mode "all" at
the first armed forward and removed when capture is closed, and it is enabled for one forward at a time. Where
the server's own variables made it ready, its hooks are used as they are, while nobody else has it on.
"""

import os
import re
import shutil
import threading
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from . import control, conv_operator
from .composition import ARMED_FAULTS, Composition, CompositionLog, CompositionReader
from .digest_capture import DigestCapture
from .direct_calls import layer_numbers
from .parameters import write_parameters
from .plugin import write_json_atomically
from .recording import goes_into_a_graph
from .state_probe import StateProbe

CONTROL = "capture-control.json"
_THEIR_HOOKS = object()
"""Hooks that stood there already, by the server's own DUMPER_* variables; they stay."""
_CORE_FIELDS = ["input_ids", "positions", "seq_lens", "req_pool_indices", "rids"]


def install(context: Any) -> None:
    """Prepares capture in each process that will hold a model."""
    if context.may_hold_a_model:
        context.when_model_is_loaded(_start)


def _start(model_runner: Any, context: Any) -> None:
    conv_operator.install(model_runner.model)
    capture = Capture(model_runner, context.control_dir, context.nonce, context.rank)
    capture.wrap_forward()
    threading.Thread(target=capture.watch, name="klbench-capture", daemon=True).start()
    context.presence.add_hooks("capture.forward", "capture.control")


class Settings:
    """One open capture: where it writes and when it must stop."""

    def __init__(self, asked: Dict[str, Any]) -> None:
        self.folder = Path(str(asked["folder"]))
        self.backend = str(asked.get("backend") or "dumper")
        if self.backend not in ("digest", "state", "dumper"):
            raise ValueError(f"no capture back end {self.backend!r}")
        self.free_floor_bytes = int(asked["free_floor_bytes"])
        self.size_cap_bytes = int(asked["size_cap_bytes"])
        self.expression: Optional[str] = None
        self.pattern: Optional[str] = None
        if asked.get("filter") is not None:
            self.pattern = str(asked["filter"])
            re.compile(self.pattern)
            # Without the core fields no row could be aligned.
            self.expression = f"search({self.pattern!r}, name) or name in {_CORE_FIELDS!r}"
        self.written_bytes = 0
        self.broken = False

    def check_folder(self) -> None:
        status = self.folder.stat()
        if not self.folder.is_absolute() or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise RuntimeError(f"{self.folder} must be an absolute folder of this user, mode 0700")


class Capture:
    """The capture of one rank. The forward thread captures; the watcher thread opens and closes."""

    def __init__(self, model_runner: Any, control_dir: Path, nonce: str, rank: int) -> None:
        self._runner = model_runner
        self._control_dir = control_dir
        self._nonce = nonce
        self._rank = rank
        self._reader = CompositionReader(nonce)
        self._log = CompositionLog(control_dir / f"forwards-{rank}.jsonl")
        self._settings: Optional[Settings] = None
        self._hooks: Any = None
        self._hooks_unwanted = False
        self._digests: Optional[Union[DigestCapture, StateProbe]] = None
        self._closed_digests: List[Union[DigestCapture, StateProbe]] = []
        self._recording: Optional[Union[DigestCapture, StateProbe]] = None
        self._foreign_dumper = _dumper().may_enable

    def wrap_forward(self) -> None:
        """Puts us around the runner's forward, on the instance: the draft model's runner is left alone."""
        original = self._runner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            composition = self._before(args[0] if args else kwargs.get("forward_batch"))
            if composition is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._after(composition)

        self._runner.forward = forward

    # The forward thread.

    def _before(self, batch: Any) -> Optional[Composition]:
        """Notes the forward; returns its composition if it is being captured."""
        try:
            if self._hooks_unwanted:
                self._remove_hooks()
            while self._closed_digests:
                self._closed_digests.pop().remove()
            self._recording = None
            if self._digests is not None:
                self._digests.forget()
            composition = self._reader.read(batch)
            settings, digests = self._settings, self._digests
            if settings is not None and not settings.broken and digests is not None:
                digests.unseen.note(self._reader.number, composition, batch)
            if composition is None:
                return None
            self._log.append(composition, getattr(self._runner, ARMED_FAULTS, ()))
            if settings is None or settings.broken or not composition.armed:
                return None
            if settings.backend != "dumper":
                return composition if self._begin_digests(composition, batch) else None
            if goes_into_a_graph(batch.input_ids.device):
                return None
            self._enable(settings, composition)
            return composition
        except Exception as error:
            self._break(error)
            return None

    def _begin_digests(self, composition: Composition, batch: Any) -> bool:
        digests = self._digests
        if digests is None or not digests.begin(composition, batch):
            return False
        self._recording = digests
        return True

    def _enable(self, settings: Settings, composition: Composition) -> None:
        free = shutil.disk_usage(str(settings.folder)).free
        if free < settings.free_floor_bytes:
            raise OSError(f"{free} bytes are free, less than the floor of {settings.free_floor_bytes}")
        if settings.written_bytes > settings.size_cap_bytes:
            raise OSError(f"{settings.written_bytes} bytes written pass the cap of {settings.size_cap_bytes}")
        dumper = _dumper()
        if self._hooks is None:
            self._hooks = self._register_hooks(dumper, settings)
        self._name = f"rank{self._rank}-{composition.number:09d}"
        self._first_index = dumper.get_state()["dump_index"]
        dumper.configure(
            enable=True,
            exp_name=self._name,
            dir=str(settings.folder),
            filter=settings.expression,
            enable_output_file=True,
            enable_output_console=False,
            enable_value=True,
            enable_grad=False,
            enable_model_value=False,
            enable_model_grad=False,
            cleanup_previous=False,
        )

    def _register_hooks(self, dumper: Any, settings: Settings) -> Any:
        hooks: Any = _THEIR_HOOKS
        if not self._foreign_dumper:
            dumper.configure(non_intrusive_mode="all")
            hooks = dumper.register_non_intrusive_dumper(self._runner.model)
        write_json_atomically(
            settings.folder / f"modules-{self._rank}.json", describe_modules(self._runner.model)
        )
        path = settings.folder / f"parameters-{self._rank}.safetensors"
        write_parameters(self._runner.model, settings.pattern, path)
        return hooks

    def _after(self, composition: Composition) -> None:
        """Switches the dumper off, counts what it wrote and says what the forward was."""
        settings = self._settings
        try:
            if self._recording is not None:
                recording, self._recording = self._recording, None
                recording.end()
                return
            dumper = _dumper()
            dumper.configure(enable=False)
            if settings is None:
                raise RuntimeError("capture was closed during a forward")
            expected = dumper.get_state()["dump_index"] - self._first_index
            folder = settings.folder / self._name
            with os.scandir(folder) as entries:
                sizes = [entry.stat().st_size for entry in entries if entry.name.endswith(".pt")]
            settings.written_bytes += sum(sizes)
            content = composition.as_dict()
            content.update(
                rank=self._rank,
                nonce=self._nonce,
                expected_files=expected,
                files=len(sizes),
                bytes=sum(sizes),
            )
            write_json_atomically(folder / "forward.json", content)
            # The dumper logs a failed write and goes on.
            if len(sizes) != expected or expected == 0:
                raise OSError(
                    f"the dumper wrote {len(sizes)} of {expected} files of forward {composition.number}"
                )
        except Exception as error:
            self._break(error)

    def _remove_hooks(self) -> None:
        hooks, self._hooks, self._hooks_unwanted = self._hooks, None, False
        if hooks is not None:
            dumper = _dumper()
            dumper.configure(enable=False)
            if hooks is not _THEIR_HOOKS:
                dumper._non_intrusives.remove(hooks)
                hooks.remove()

    def _break(self, error: BaseException) -> None:
        """Marks the capture invalid; nothing of this may reach the server."""
        settings = self._settings
        if settings is not None:
            settings.broken = True
        content = {
            "rank": self._rank,
            "what": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        }
        for folder in [self._control_dir] + ([settings.folder] if settings is not None else []):
            try:
                write_json_atomically(folder / f"invalid-{self._rank}.json", content)
            except OSError:
                continue

    # The watcher thread.

    def watch(self) -> None:
        """Answers each control file, until the process ends."""
        control.watch(self._control_dir / CONTROL, self._answer, self._break)

    def _answer(self, asked: Any) -> None:
        if not isinstance(asked, dict) or asked.get("nonce") != self._nonce:
            return
        answer: Dict[str, Any] = {
            "seq": asked.get("seq"),
            "nonce": self._nonce,
            "rank": self._rank,
            "ok": True,
            "error": None,
            "free_bytes": None,
        }
        path = self._control_dir / f"capture-ack-{self._rank}.json"
        try:
            with control.still_working(path, answer):
                self._close_digests()
            if asked.get("capture") is None:
                self._settings = None
                self._hooks_unwanted = True
            else:
                settings = Settings(asked["capture"])
                if self._foreign_dumper and settings.backend == "dumper":
                    _check_their_dumper()
                settings.check_folder()
                write_json_atomically(settings.folder / f"ready-{self._rank}.json", answer)
                answer["free_bytes"] = shutil.disk_usage(str(settings.folder)).free
                self._hooks_unwanted = self._hooks is not None
                if settings.backend != "dumper":
                    self._digests = self._open_digests(settings)
                self._settings = settings
        except Exception as error:
            answer.update(ok=False, error=f"{type(error).__name__}: {error}")
        write_json_atomically(path, answer)

    def _open_digests(self, settings: Settings) -> "DigestCapture | StateProbe":
        back_end = StateProbe if settings.backend == "state" else DigestCapture
        return back_end(
            self._runner,
            settings.folder,
            self._rank,
            self._nonce,
            settings.free_floor_bytes,
            settings.size_cap_bytes,
            describe_modules(self._runner.model),
            self._break,
        )

    def _close_digests(self) -> None:
        """Completes the trace that is open; its hooks go with the next forward."""
        digests, settings = self._digests, self._settings
        if digests is not None:
            self._settings = self._digests = None
            self._closed_digests.append(digests)
            broken = settings is not None and settings.broken
            digests.close(f"invalid-{self._rank}.json says why" if broken else None)


def describe_modules(model: Any) -> Dict[str, Any]:
    """For each module by path: its class, what state it reads, how far back (None: all of it), its layer."""
    modules: Dict[str, Any] = {}
    layers = layer_numbers(model)
    for path, module in model.named_modules():
        names: List[str] = [kind.__name__ for kind in type(module).__mro__]
        state = _state(names)
        reach = {"kv": "sliding_window_size", "conv": "behind"}.get(state or "")
        window = getattr(module, reach, None) if reach else None
        modules[path] = {
            "class": type(module).__name__,
            "state": state,
            "window": window if isinstance(window, int) and window > -1 else None,
            "layer": layers[path],
        }
    return modules


def _state(class_names: List[str]) -> Optional[str]:
    """What hidden input a module of these classes has."""
    if "RadixAttention" in class_names:
        return "kv"
    if "ShortConvolution" in class_names:
        return "conv"
    if any(name.startswith("RadixLinear") or "MambaMixer" in name for name in class_names):
        return "ssm"
    return None


def _check_their_dumper() -> None:
    """Raises RuntimeError where the server's own DUMPER_* variables leave us no use of its dumper."""
    config = _dumper().get_state()["config"]
    if config["enable"]:
        raise RuntimeError("the dumper is in use by this server's own DUMPER_* variables")
    if config["non_intrusive_mode"] != "all":
        raise RuntimeError(
            "this server's own DUMPER_* variables hook no modules: DUMPER_NON_INTRUSIVE_MODE=all"
        )


def _dumper() -> Any:
    from sglang.srt.debug_utils.dumper import dumper

    return dumper
