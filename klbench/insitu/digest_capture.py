"""Digests in place: hooks on every module and the head, active while an armed forward runs.

Hooks are registered at the first armed forward and removed when the capture is closed; between armed forwards
each costs one comparison. A call's inputs are taken before it runs and its outputs after it. What goes wrong
here marks the capture broken, through `trouble`, and never reaches the server.

The forward thread calls `begin`, `end` and the hooks; `close` may come from another thread, once the server
has answered.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch

from .composition import Composition
from .direct_calls import DirectCall, is_called_directly, never_called
from .head import PROCESSOR, Head, is_scoring, sampled_rows
from .module_sites import Site, each_tensor, sites_of
from .recording import ArmedRows, Axes, Names, Recording, goes_into_a_graph
from .recording_writer import Limits, NewNames, RecordingWriter, Tokens
from .state_reads import StateReads
from .trace_writer import IN, OUT, TraceWriter
from .unseen_writes import UnseenWrites

_LAST_FORWARD_S = 10.0
"""How long closing waits for a forward that the overlap scheduler began past the end of a request."""


_Call = Tuple[int, Optional[str], Optional[int]]
"""The operator's number, its kind of state and its window."""


class _Running:
    """One armed forward: its recording, the calls that are open and how often each module was called."""

    def __init__(self, recording: Recording, batch: Any, state: StateReads) -> None:
        self.recording = recording
        self.batch = batch
        self.state = state
        self.stack: List[Tuple[Site, str, _Call]] = []
        self.paths: List[str] = []
        self.calls: Dict[str, int] = {}


class DigestCapture:
    """The digest back end of one rank for one open capture.

    `describe` says for each module path its class, state and window, as capture.describe_modules does.
    """

    def __init__(
        self,
        model_runner: Any,
        folder: Path,
        rank: int,
        nonce: str,
        free_floor_bytes: int,
        size_cap_bytes: int,
        describe: Dict[str, Any],
        trouble: Callable[[BaseException], None],
    ) -> None:
        self._runner = model_runner
        self._modules = describe
        self._trouble = trouble
        self._operators, self._arguments, self._dtypes = Names(), Names(), Names()
        self._axes: Axes = {}
        self._writer = RecordingWriter(
            TraceWriter(folder, rank, nonce, "digest"),
            Limits(folder, free_floor_bytes, size_cap_bytes),
            trouble,
        )
        self.unseen = UnseenWrites(model_runner)
        self._lock = threading.Lock()
        self._running: Optional[_Running] = None
        self._ended: Optional[_Running] = None
        self._sampling: Optional[Recording] = None
        self._has_sampler = False
        self._waits = False
        """Whether the ended forward is not handed over yet, because its sampler is to come."""
        self._calls: Dict[Tuple[str, int], _Call] = {}
        self._handles: List[Any] = []
        self._heads: List[Head] = []
        self._not_observed: Set[str] = set()
        self._state_failed = False
        self._attentions = sum(about["state"] == "kv" for about in describe.values())
        self._stateful = any(about["state"] for about in describe.values())
        # Only there is every operator torch's own, so that a tensor's version tells of each change.
        self._versions_tell = os.environ.get("KLBENCH_CPU_ENGINE") == "1"

    # The runner's forward.

    def begin(self, composition: Composition, batch: Any) -> bool:
        """Starts to record a forward; False where it cannot be."""
        device = batch.input_ids.device
        if goes_into_a_graph(device):
            return False
        if not self._handles:
            self._register()
        self._writer.forward_begins()
        rows = ArmedRows.of(composition, int(batch.input_ids.shape[0]))
        recording = Recording(composition, rows, device, self._dtypes, self._versions_tell, self._axes)
        state = StateReads(recording, batch, self._attentions, self._argument)
        self._running = _Running(recording, batch, state)
        return True

    def end(self) -> None:
        """Ends the forward that was begun and hands it to the writer."""
        running = self._running
        if running is None:
            # A hook failed, which was said; or the capture was closed under the forward.
            return
        recording = running.recording
        self._look(running, "model", running.state.finish)
        if running.state.own_rows_only:
            self._not_observed.add("slots of earlier positions at decode steps: only all of them together")
        if running.state.unknown_backend is not None:
            self._not_observed.add(f"attention metadata: of {running.state.unknown_backend} it is not known")
        if not recording.entries:
            raise RuntimeError(
                f"no module was called in forward {recording.composition.number}: is it a graph?"
            )
        tokens = [running.batch.input_ids, running.batch.positions]
        # Models with several positions a token (images) have the text's in the first row.
        chosen = [recording.selected(v if v.dim() == 1 else v[0]).to(torch.int64) for v in tokens]
        recording.extras.append((Tokens(), torch.stack(chosen)))
        composition = recording.composition
        # What the sampler takes after a decode step is certain to be used: both travel together.
        self._waits = self._has_sampler and composition.mode == "decode" and not is_scoring(composition)
        self._ended, self._running = running, None
        if not self._waits:
            self._hand_over(recording, sampled=False)

    def _hand_over(self, recording: Recording, sampled: bool) -> None:
        self._waits = False
        self._writer.put(self._new_names(), recording.take(), sampled)

    def forget(self) -> None:
        """Another forward begins: the one before gets no sampler any more."""
        ended, self._ended = self._ended, None
        self._running = self._sampling = None
        if ended is not None and self._waits:
            self._hand_over(ended.recording, sampled=False)

    def close(self, invalid: Optional[str]) -> None:
        """Completes the trace; the hooks go with `remove`, in the forward thread."""
        deadline = time.monotonic() + _LAST_FORWARD_S
        while self._running is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        with self._lock:
            self.forget()
            observes_head = bool(self._heads) and all(head.observes for head in self._heads)
            observes_state = self._stateful and not self._state_failed
            missed = self._never_called()
            noted = sorted(self._not_observed)
            self._writer.close(observes_state, observes_head, invalid, noted, self.unseen.table(), missed)

    def _never_called(self) -> NewNames:
        """Operators with state that ran past us: they stand in the trace without anything of theirs."""
        paths = never_called(self._modules, {path for path, _ in self._calls})
        for path in paths if self._calls else ():
            about = self._modules[path]
            self._operator(path, 0, about["class"], about["state"], about["window"])
            self._not_observed.add(f"{path}: it was not called as a module, nor was its state seen")
        return self._new_names()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for head in self._heads:
            head.remove()
        self._handles = []

    def _register(self) -> None:
        for site in sites_of(self._runner.model):
            module = site.module
            stateful = any(self._modules.get(path, {}).get("state") for path in site.paths)
            if stateful and is_called_directly(self._runner.model, site):
                self._handles.append(DirectCall(module))
            self._handles += [
                module.register_forward_pre_hook(self._pre_hook(site), with_kwargs=True),
                module.register_forward_hook(self._post_hook(site), with_kwargs=True),
            ]
            if site.class_name == PROCESSOR:
                self._heads.append(
                    Head(module, self._current, self._head_operator, self._argument, self._trouble)
                )
        for head in self._heads:
            head.install()
        sampler = getattr(self._runner, "sampler", None)
        if isinstance(sampler, torch.nn.Module):
            self._has_sampler = True
            self._handles += [
                sampler.register_forward_pre_hook(self._before_sampler, with_kwargs=True),
                sampler.register_forward_hook(self._after_sampler, with_kwargs=True),
            ]
        else:
            self._not_observed.add("sampler: not a module of this version")

    # Names.

    def _operator(self, path: str, call: int, class_name: str, state: Any, window: Any) -> int:
        return self._operators.number((path, call), (path, call, class_name, state, window))

    def _head_operator(self, name: str) -> int:
        return self._operator(name, 0, PROCESSOR, None, None)

    def _argument(self, name: str) -> int:
        return self._arguments.number(name)

    def _new_names(self) -> NewNames:
        return NewNames(
            tuple(self._operators.take_new()),
            tuple(self._arguments.take_new()),
            tuple(self._dtypes.take_new()),
        )

    def _current(self) -> Optional[Recording]:
        running = self._running
        return None if running is None else running.recording

    # Hooks of modules.

    def _pre_hook(self, site: Site) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            running = self._running
            if running is not None:
                try:
                    self._enter(running, site, args, kwargs)
                except Exception as error:
                    self._fail(error)

        return hook

    def _post_hook(self, site: Site) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            running = self._running
            if running is not None:
                try:
                    self._leave(running, site, site.result(args, kwargs, output))
                except Exception as error:
                    self._fail(error)

        return hook

    def _fail(self, error: BaseException) -> None:
        self._running = None
        self._trouble(error)

    def _enter(self, running: _Running, site: Site, args: Any, kwargs: Any) -> None:
        recording = running.recording
        if recording.event < 0:
            self._settle(running)
            recording = running.recording
        path = site.path(running.paths)
        call = running.calls.get(path, 0)
        running.calls[path] = call + 1
        known = self._calls.get((path, call))
        if known is None:
            about = self._modules.get(path, {})
            state, window = about.get("state"), about.get("window")
            operator = self._operator(path, call, site.class_name, state, window)
            known = self._calls[path, call] = (operator, state, window)
        operator, state, _ = known
        running.stack.append((site, path, known))
        running.paths.append(path)
        recording.next_event()
        named = [(site.argument(place), value) for place, value in enumerate(args)]
        for name, value in (*named, *kwargs.items()):
            if name in site.ignored:
                continue
            if isinstance(value, torch.Tensor):
                recording.add(operator, IN, self._argument(name), value)
            elif value is not None and value is not running.batch:
                self._add_inner(recording, operator, IN, path, name, value)
        if state == "conv":
            self._look(running, path, lambda: running.state.before_convolution(site.module, args[0]))
        elif state is not None and state != "kv":
            self._look(
                running, path, lambda: running.state.recurrent(operator, self._layer(path), written=False)
            )

    def _leave(self, running: _Running, site: Site, output: Any) -> None:
        # A call that raised never left: its callers did not either.
        while running.stack and running.stack[-1][0] is not site:
            running.stack.pop()
            running.paths.pop()
        if not running.stack:
            return
        _, path, (operator, state, window) = running.stack.pop()
        running.paths.pop()
        recording = running.recording
        if site.class_name == PROCESSOR:
            for head in self._heads:
                head.finished(recording, output)
            return
        recording.next_event()
        if isinstance(output, torch.Tensor):
            recording.add(operator, OUT, self._argument("0"), output)
        elif type(output) is tuple:
            for place, value in enumerate(output):
                if value is not None:
                    self._add_inner(recording, operator, OUT, path, str(place), value)
        else:
            self._add_inner(recording, operator, OUT, path, "", output)
        if state == "kv":
            self._look(running, path, lambda: self._look_at_kv(running, site, operator, window))
            self._look_at_metadata(running, operator)
        elif state == "conv":
            self._look(running, path, lambda: running.state.convolution(operator, site.module))
        elif state is not None:
            self._look(
                running, path, lambda: running.state.recurrent(operator, self._layer(path), written=True)
            )

    def _settle(self, running: _Running) -> None:
        """Rows may have been padded since the forward began; the first module sees how many there are."""
        recording = running.recording
        total = int(running.batch.input_ids.shape[0])
        if total != recording.rows.total:
            rows = ArmedRows.of(recording.composition, total)
            running.recording = Recording(
                recording.composition, rows, recording.device, self._dtypes, self._versions_tell, self._axes
            )
            running.state = StateReads(running.recording, running.batch, self._attentions, self._argument)

    def _add_inner(
        self, recording: Recording, operator: int, direction: int, path: str, name: str, value: Any
    ) -> None:
        if isinstance(value, torch.Tensor):
            recording.add(operator, direction, self._argument(name or "0"), value)
            return
        each_tensor(
            name,
            value,
            lambda inner, tensor: recording.add(operator, direction, self._argument(inner or "0"), tensor),
            lambda what: self._not_observed.add(f"{path} {'out' if direction else 'in'} {what}"),
        )

    # State.

    def _layer(self, path: str) -> Optional[int]:
        layer: Optional[int] = self._modules.get(path, {}).get("layer")
        return layer

    def _look_at_kv(self, running: _Running, site: Site, operator: int, window: Any) -> None:
        module = site.module
        kind = str(getattr(getattr(module, "attn_type", None), "value", "decoder"))
        if getattr(module, "is_cross_attention", False) or kind != "decoder":
            raise NotImplementedError(f"state of {kind} attention is not looked at")
        running.state.attention(operator, module, window)

    def _look_at_metadata(self, running: _Running, operator: int) -> None:
        try:
            running.state.metadata(operator)
        except Exception as error:
            self._not_observed.add(f"attention metadata: {type(error).__name__}: {error}")

    def _look(self, running: _Running, path: str, look: Callable[[], None]) -> None:
        """Runs `look`; a state that this version or pool hides leaves the rest of the trace whole."""
        before = running.state.mark()
        try:
            look()
        except Exception as error:
            running.state.undo(before)
            self._state_failed = True
            self._not_observed.add(f"{path} state: {type(error).__name__}: {error}")

    # The sampler.

    def _before_sampler(self, _: Any, args: Any, kwargs: Any) -> None:
        ended, self._sampling = self._ended, None
        try:
            if ended is None or is_scoring(ended.recording.composition):
                return
            output = args[0] if args else kwargs["logits_output"]
            wanted = args[2] if len(args) > 2 else kwargs.get("return_logprob")
            logits = output.next_token_logits
            rows = sampled_rows(ended.recording.composition, int(logits.shape[0]))
            if not wanted or rows is None:
                return
            earlier = recording = ended.recording
            if not self._waits:
                recording = Recording(
                    earlier.composition, earlier.rows, earlier.device, self._dtypes, self._versions_tell
                )
                recording.event = earlier.event
            group, selection = recording.group_of(rows)
            recording.next_event()
            operator = self._head_operator("logprob")
            recording.add_rows(operator, IN, self._argument("logits"), logits, group, selection)
            self._sampling = recording
        except Exception as error:
            self._fail(error)

    def _after_sampler(self, _: Any, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ARG002
        with self._lock:
            recording, self._sampling = self._sampling, None
            try:
                output = args[0] if args else kwargs["logits_output"]
                if recording is not None and self._add_sampled(recording, output) and not self._waits:
                    self._hand_over(recording, sampled=True)
                # A step that waited goes now, whatever the sampler did.
                self.forget()
            except Exception as error:
                self._fail(error)

    def _add_sampled(self, recording: Recording, output: Any) -> bool:
        """Notes the logprobs of the sampled tokens; False where there are none."""
        values = output.next_token_logprobs
        if not isinstance(values, torch.Tensor):
            return False
        rows = sampled_rows(recording.composition, int(values.shape[0]))
        if rows is None:
            return False
        group, selection = recording.group_of(rows)
        recording.next_event()
        operator = self._head_operator("logprob")
        recording.add_rows(operator, OUT, self._argument("0"), values, group, selection)
        return True
