"""The state probe: what is in the K/V pool and in recurrent slots between forwards, with no hook on a module.

For a server that replays CUDA graphs, or a divergence that goes away while operators are watched. A forward
that holds an armed request is looked at twice: before it runs, at the recurrent slots that its rows will
read; after it, at all K and V rows that they could read, their own included, and at the recurrent slots that
they left. On a GPU both run in the forward's own stream, before and behind it, and nobody waits.

The trace has one operator for each module with state, by the module's path, and no tensors of operators.
"""

from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

from .composition import Composition
from .recording import ArmedRows, Names, Recording, goes_into_a_graph
from .recording_writer import Limits, NewNames, RecordingWriter, Tokens
from .state_reads import Pools, StateReads
from .trace_writer import TraceWriter
from .unseen_writes import UnseenWrites

BACKEND = "state"


class _Stateful(NamedTuple):
    """One module with state."""

    path: str
    module: Any
    operator: int
    state: str
    window: Optional[int]
    layer: Optional[int]


class _Running(NamedTuple):
    recording: Recording
    batch: Any
    reads: StateReads


class StateProbe:
    """The probe of one rank for one open capture; speaks as DigestCapture does.

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
        self._pools = Pools(model_runner.req_to_token_pool, model_runner.token_to_kv_pool)
        self._operators, self._arguments, self._dtypes = Names(), Names(), Names()
        self._not_observed = ["operators: only the state between forwards was looked at"]
        self._stateful = self._find(model_runner.model, describe)
        if not self._stateful:
            raise RuntimeError("the model has no module with state that is known here")
        self._writer = RecordingWriter(
            TraceWriter(folder, rank, nonce, BACKEND),
            Limits(folder, free_floor_bytes, size_cap_bytes),
            trouble,
        )
        self.unseen = UnseenWrites(model_runner)
        self._running: Optional[_Running] = None

    def _find(self, model: Any, describe: Dict[str, Any]) -> List[_Stateful]:
        found = []
        for path, module in model.named_modules():
            about = describe.get(path, {})
            state, window = about.get("state"), about.get("window")
            # A module that reads state through a child of its own is seen there.
            inner = any(other.startswith(path + ".") and describe[other]["state"] for other in describe)
            if state is None or inner:
                continue
            layer = about.get("layer")
            if state != "kv" and layer is None:
                self._not_observed.append(
                    f"{path} state: neither it nor any module around it has a layer number"
                )
                continue
            number = self._operators.number((path, 0), (path, 0, about["class"], state, window))
            found.append(_Stateful(path, module, number, state, window, layer))
        return found

    # The runner's forward.

    def begin(self, composition: Composition, batch: Any) -> bool:
        """Looks at what a forward will read; False where it cannot be looked at."""
        device = batch.input_ids.device
        if goes_into_a_graph(device):
            return False
        self._writer.forward_begins()
        rows = ArmedRows.of(composition, int(batch.input_ids.shape[0]))
        recording = Recording(composition, rows, device, self._dtypes, versions_tell=False)
        attentions = sum(module.state == "kv" for module in self._stateful)
        reads = StateReads(recording, batch, attentions, self._arguments.number, self._pools)
        for place in self._stateful:
            if place.state != "kv":
                recording.next_event()
                reads.recurrent(place.operator, place.layer, written=False)
        tokens = [batch.input_ids, batch.positions]
        chosen = [recording.selected(v if v.dim() == 1 else v[0]).to(torch.int64) for v in tokens]
        recording.extras.append((Tokens(), torch.stack(chosen)))
        self._running = _Running(recording, batch, reads)
        return True

    def end(self) -> None:
        """Looks at what the forward left and hands both looks to the writer."""
        running, self._running = self._running, None
        if running is None:
            return
        recording, _, reads = running
        for place in self._stateful:
            recording.next_event()
            if place.state == "kv":
                reads.attention(place.operator, place.module, place.window)
            else:
                reads.recurrent(place.operator, place.layer, written=True)
        reads.finish()
        names = NewNames(
            tuple(self._operators.take_new()),
            tuple(self._arguments.take_new()),
            tuple(self._dtypes.take_new()),
        )
        self._writer.put(names, recording.take(), sampled=False)

    def forget(self) -> None:
        """Another forward begins."""
        self._running = None

    def close(self, invalid: Optional[str]) -> None:
        """Completes the trace."""
        self._writer.close(True, False, invalid, self._not_observed, self.unseen.table())

    def remove(self) -> None:
        """There is no hook to remove."""
