"""The fault lab without a server: arming by a message, the proof that it fired, and nothing left behind."""

import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import faults, plugin  # noqa: E402
from klbench.insitu.faults_catalogue import parse_faults  # noqa: E402

NONCE = "a1b2"
WIDTH = 8


class Norm(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.clone()


class Presence:
    def __init__(self) -> None:
        self.content: dict[str, Any] = {"faults": [], "hooks": []}

    def update(self, **fields: Any) -> None:
        self.content.update(fields)

    def add_hooks(self, *names: str) -> None:
        self.content["hooks"] += names


class Runner:
    """A model of two norms, run as sglang's runner runs its model."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        layers = [torch.nn.Module(), torch.nn.Module()]
        for layer in layers:
            layer.input_layernorm = Norm()
        self.model.layers = torch.nn.ModuleList(layers)

    def forward(self, batch: Any) -> Any:
        x = torch.ones(batch.input_ids.shape[0], WIDTH)
        for layer in self.model.layers:
            x = layer.input_layernorm(x)
        return x


@pytest.fixture
def context(tmp_path: Path) -> Any:
    return SimpleNamespace(control_dir=tmp_path, nonce=NONCE, rank=0, presence=Presence())


@pytest.fixture
def lab(context: Any) -> faults.FaultLab:
    lab = faults.FaultLab(Runner(), context)
    lab.wrap_forward()
    return lab


def _extend(rows: int) -> Any:
    mode = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)
    return SimpleNamespace(
        forward_mode=mode,
        rids=["klb-a1b2-1g-0"],
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[rows],
        input_ids=torch.zeros(rows),
    )


def _run(lab: faults.FaultLab, rows: int) -> Any:
    return lab._runner.forward(_extend(rows))


def _ask(lab: faults.FaultLab, context: Any, text: "str | None", **more: Any) -> dict[str, Any]:
    lab.answer({"seq": 1, "nonce": NONCE, "faults": text, **more})
    answer: dict[str, Any] = json.loads((context.control_dir / "fault-ack-0.json").read_text())
    return answer


def test_a_fault_acts_while_it_is_armed_and_only_in_calls_of_enough_rows(
    lab: faults.FaultLab, context: Any
) -> None:
    clean = _run(lab, 4)
    modules = [dict(vars(layer.input_layernorm)) for layer in lab._runner.model.layers]
    answer = _ask(lab, context, "input_norm-rows:layer=1,rows=4")
    assert (answer["ok"], answer["armed"]) == (True, ["input_norm-rows:layer=1,rows=4,ulps=2"])
    assert context.presence.content["faults"][0]["name"] == "input_norm-rows"

    assert torch.equal(_run(lab, 3), clean[:3])
    assert not torch.equal(_run(lab, 4), clean)

    answer = _ask(lab, context, None)
    (proof,) = answer["disarmed"]
    assert (proof["fault"], proof["count"]) == ("input_norm-rows", 1)
    assert proof["first"] == {"rid": "klb-a1b2-1g-0", "positions": [0, 3], "rows": 4, "forward": 2}
    assert torch.equal(_run(lab, 4), clean)
    assert [dict(vars(layer.input_layernorm)) for layer in lab._runner.model.layers] == modules
    assert context.presence.content["faults"] == []
    assert list(context.control_dir.glob("fired-*.json")) == []


def test_the_proof_lies_in_the_control_folder_and_says_when_nothing_fired(
    lab: faults.FaultLab, context: Any
) -> None:
    _ask(lab, context, "input_norm-rows:rows=64")
    path = context.control_dir / f"fired-0-{os.getpid()}.json"
    assert json.loads(path.read_text())["count"] == 0
    _run(lab, 8)
    assert json.loads(path.read_text())["first"] is None
    _run(lab, 64)
    assert json.loads(path.read_text())["first"]["rows"] == 64
    assert _ask(lab, context, None)["disarmed"][0]["count"] == 1


def test_what_is_armed_replaces_what_was_and_the_count_begins_anew(
    lab: faults.FaultLab, context: Any
) -> None:
    _ask(lab, context, "input_norm-rows:rows=2")
    _run(lab, 2)
    answer = _ask(lab, context, "input_norm-rows:layer=0,rows=2+input_norm-rows:layer=1,rows=2")
    assert [proof["count"] for proof in answer["disarmed"]] == [1]
    _run(lab, 2)
    _run(lab, 2)
    assert [proof["count"] for proof in _ask(lab, context, None)["disarmed"]] == [2, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [("input_norm-rows:layer=7", "no layers.7.input_layernorm"), ("nonsense", "no fault 'nonsense'")],
)
def test_what_cannot_be_planted_is_refused_and_leaves_nothing_armed(
    lab: faults.FaultLab, context: Any, text: str, says: str
) -> None:
    clean = _run(lab, 4)
    # The first of two is planted before the second is refused.
    answer = _ask(lab, context, f"input_norm-rows:rows=1+{text}")
    assert answer["ok"] is False
    assert says in answer["error"]
    assert torch.equal(_run(lab, 4), clean)
    assert list(context.control_dir.glob("fired-*.json")) == []


def test_a_message_with_another_nonce_is_ignored(lab: faults.FaultLab, context: Any) -> None:
    lab.answer({"seq": 1, "nonce": "other", "faults": "input_norm-rows:rows=1"})
    assert not (context.control_dir / "fault-ack-0.json").exists()
    assert torch.equal(_run(lab, 4), torch.ones(4, WIDTH))


def test_arming_waits_until_the_running_forward_has_ended(lab: faults.FaultLab, context: Any) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Norm):
        def forward(self, x: Any) -> Any:
            inside.set()
            assert go_on.wait(60)
            return x.clone()

    lab._runner.model.layers[0].input_layernorm = Slow()
    results: list[Any] = []
    forward = threading.Thread(target=lambda: results.append(_run(lab, 4)))
    forward.start()
    assert inside.wait(60)
    arming = threading.Thread(target=lab.arm, args=(parse_faults("input_norm-rows:rows=1"),))
    arming.start()
    assert context.presence.content["faults"] == []
    go_on.set()
    forward.join(60)
    arming.join(60)
    assert torch.equal(results[0], torch.ones(4, WIDTH))
    assert not torch.equal(_run(lab, 4), torch.ones(4, WIDTH))


@pytest.mark.parametrize(
    ("variables", "installed"),
    [
        ({}, None),
        ({"KLBENCH_FAULT_LAB": "yes"}, None),
        ({"KLBENCH_FAULT_LAB": "1"}, ((), True)),
        ({"KLBENCH_FAULT": "race"}, (("race",), False)),
        ({"KLBENCH_FAULT": "pair-inside"}, (("o_proj-rows", "post_norm-rows"), False)),
    ],
)
def test_without_permission_nothing_of_the_lab_is_in_the_server(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], installed: Any
) -> None:
    for name in ("KLBENCH_FAULT", "KLBENCH_FAULT_LAB", "KLBENCH_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr(
        faults, "install", lambda _, armed, lab: calls.append((tuple(a.fault.name for a in armed), lab))
    )
    monkeypatch.setattr(plugin, "_hook_model_load", lambda _: None)
    monkeypatch.setitem(sys.modules, "klbench.insitu.faults", faults)
    context = SimpleNamespace(may_hold_a_model=True, when_model_is_loaded=lambda _: None)
    plugin._install(context)
    assert calls == ([] if installed is None else [installed])
