"""The fault lab: arms and disarms faults of the catalogue in the loaded model of one server.

Only in a server that klbench launches with the permission `KLBENCH_FAULT_LAB=1`, or with a fault of its own
in `KLBENCH_FAULT`, which is armed when the model is loaded. Faults act on every request alike, and only while
they are armed: arming and disarming happen between two forwards, and disarming puts back exactly the
functions that were there. What a fault has left in the prefix cache is not undone: flush in between.

With the permission a thread of each rank reads `fault-control.json` in the control folder, also when the
server is idle, and answers in `fault-ack-<rank>.json`:

    {"seq": 3, "nonce": "a1b2", "faults": "o_proj-rows:layer=2"}
    {"seq": 3, "nonce": "a1b2", "rank": 0, "ok": true, "error": null,
     "armed": ["o_proj-rows:layer=2,rows=64"], "disarmed": [{"fault": "kv-write", "count": 16, "first": ...}]}

A new request replaces what is armed; `faults` null disarms. `disarmed` is the proof (faults_planting.py) of
each fault that was armed until then.
"""

import functools
import os
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

from . import control, conv_operator
from . import faults_arithmetic as arithmetic
from . import faults_attention as attention
from . import faults_conv as conv
from . import faults_state as state
from .composition import ARMED_FAULTS
from .faults_catalogue import ArmedFault, parse_faults
from .faults_planting import FiredProof, Planting
from .faults_seams import Moments, Wraps
from .plugin import write_json_atomically

CONTROL = "fault-control.json"


class FaultLab:
    """The faults of one rank. The forward thread runs them; the watcher thread arms and disarms."""

    def __init__(self, model_runner: Any, context: Any) -> None:
        self._runner = model_runner
        self._context = context
        self._between = threading.RLock()
        """Held by a forward while it runs, and by whoever arms or disarms."""
        self._moments: Optional[Moments] = None
        self._wraps = Wraps()
        self._proofs: List[FiredProof] = []

    def wrap_forward(self) -> None:
        """Puts us around the runner's forward, on the instance: the draft model's runner is left alone."""
        original = self._runner.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._between:
                moments = self._moments
                if moments is None:
                    return original(*args, **kwargs)
                moments.begin(args[0] if args else kwargs["forward_batch"])
                try:
                    return original(*args, **kwargs)
                finally:
                    moments.end()

        self._runner.forward = forward

    def arm(self, faults: Sequence[ArmedFault]) -> List[Dict[str, Any]]:
        """Arms exactly these faults; returns the proofs of those that were armed.

        Raises ValueError where the model has no such place; nothing is armed then.
        """
        with self._between:
            disarmed = self._disarm()
            if faults:
                try:
                    self._plant(faults)
                except BaseException:
                    self._disarm()
                    raise
            setattr(self._runner, ARMED_FAULTS, tuple(armed.spelled for armed in faults))
            self._context.presence.update(
                faults=[{"name": armed.fault.name, "params": dict(armed.parameters)} for armed in faults]
            )
            return disarmed

    def _plant(self, faults: Sequence[ArmedFault]) -> None:
        self._moments = moments = Moments()
        for number, armed in enumerate(faults, 1):
            name = f"fired-{self._context.rank}-{os.getpid()}{'' if number == 1 else f'-{number}'}.json"
            proof = FiredProof(armed, self._context.control_dir / name)
            self._proofs.append(proof)
            PLANTERS[armed.fault.name](Planting(armed, self._runner, moments, self._wraps, proof))

    def _disarm(self) -> List[Dict[str, Any]]:
        self._moments = None
        proofs, self._proofs = self._proofs, []
        try:
            self._wraps.undo()
        finally:
            fired = [proof.close() for proof in proofs]
        return fired

    # The watcher thread.

    def watch(self) -> None:
        """Answers each control file, until the process ends."""
        control.watch(self._context.control_dir / CONTROL, self.answer, self._context.presence.fail)

    def answer(self, asked: Any) -> None:
        """Does what a control message asks and acknowledges it; one of another server is ignored."""
        if not isinstance(asked, dict) or asked.get("nonce") != self._context.nonce:
            return
        answer: Dict[str, Any] = {
            "seq": asked.get("seq"),
            "nonce": self._context.nonce,
            "rank": self._context.rank,
            "ok": True,
            "error": None,
            "armed": [],
            "disarmed": [],
        }
        try:
            faults = parse_faults(asked["faults"]) if asked.get("faults") is not None else ()
            answer["disarmed"] = self.arm(faults)
            answer["armed"] = [armed.spelled for armed in faults]
        except Exception as error:
            answer.update(ok=False, error=f"{type(error).__name__}: {error}")
        write_json_atomically(self._context.control_dir / f"fault-ack-{self._context.rank}.json", answer)


def install(context: Any, faults: Sequence[ArmedFault], lab: bool) -> None:
    """Prepares the fault lab in a process that will hold a model; `lab` permits arming at run time."""

    def start(model_runner: Any, loaded: Any) -> None:
        own = FaultLab(model_runner, loaded)
        own.wrap_forward()
        if faults:
            own.arm(faults)
        if lab:
            threading.Thread(target=own.watch, name="klbench-faults", daemon=True).start()
            loaded.presence.add_hooks("faults.control")

    context.when_model_is_loaded(start)


def _rows(*names: str) -> Callable[[Planting], None]:
    def plant(planting: Planting) -> None:
        arithmetic.plant_rows(planting, *names)

    return plant


def _conv_rows(planting: Planting) -> None:
    conv_operator.install(planting.model)
    arithmetic.plant_rows(planting, "conv.conv1d")


def _restored_key(planting: Planting) -> None:
    state.plant_restore(planting, state.KEY)


PLANTERS: Dict[str, Callable[[Planting], None]] = {
    "o_proj-rows": arithmetic.plant_split_sum,
    "qkv_proj-rows": _rows("self_attn.qkv_proj"),
    "gate_up_proj-rows": _rows("mlp.gate_up_proj"),
    "down_proj-rows": _rows("mlp.down_proj"),
    "input_norm-rows": _rows("input_layernorm"),
    "post_norm-rows": _rows("post_attention_layernorm"),
    "q_norm-rows": arithmetic.plant_head_norm_rows,
    "activation-rows": _rows("mlp.act_fn"),
    "router-rows": _rows("mlp.gate"),
    "experts-rows": _rows("mlp.experts"),
    "batch-scale": arithmetic.plant_batch_scale,
    "residual-gap": lambda planting: arithmetic.plant_gap(planting, "post_attention_layernorm"),
    "conv_in-rows": _rows("conv.in_proj"),
    "conv-rows": _conv_rows,
    "conv-gap": lambda planting: arithmetic.plant_gap(planting, "conv.out_proj"),
    "ffn_norm-rows": _rows("ffn_norm"),
    "collective-order": arithmetic.plant_collective_order,
    "padding-scale": arithmetic.plant_padding_scale,
    "late-norm": arithmetic.plant_late_norm,
    "lm_head-rows": arithmetic.plant_lm_head_rows,
    "log-of-softmax": arithmetic.plant_log_of_softmax,
    "race": arithmetic.plant_race,
    "attention-blocks": attention.plant_blocks,
    "attention-split": attention.plant_split,
    "attention-prompt": attention.plant_prompt,
    "decode-window": attention.plant_missing_key,
    "window-short": lambda planting: attention.plant_window(planting, -1),
    "window-long": lambda planting: attention.plant_window(planting, 1),
    "suffix-position": attention.plant_suffix_position,
    "key-write": lambda planting: state.plant_write(planting, state.KEY),
    "value-write": lambda planting: state.plant_write(planting, state.VALUE),
    "interval-write": state.plant_interval_write,
    "key-overwrite": state.plant_overwrite,
    "slot-reuse": state.plant_slot_reuse,
    "window-evict": state.plant_window_evict,
    "chunk-key": state.plant_chunk_key,
    "stale-retraction": state.plant_stale,
    "conv-depth": conv.plant_depth,
    "conv-zeroed": conv.plant_zeroed,
    "conv-rounded": conv.plant_rounded,
    "conv-other": conv.plant_other,
    "conv-checkpoint": conv.plant_checkpoint,
    "conv-write": conv.plant_write,
    "conv-slot-reuse": conv.plant_slot_reuse,
    "conv-chunk": conv.plant_chunk,
    "restore-key": _restored_key,
    "restore-value": lambda planting: state.plant_restore(planting, state.VALUE),
    "restore-page": _restored_key,
    "restore-residue": _restored_key,
    "restore-not-first": _restored_key,
}
"""How each fault of the catalogue is planted."""
