"""The switch around each forward: what is captured of it and where to, whichever back end is asked for.

The dumper is one of our own that notes how it is set; a CUDA graph is captured as far as torch says so.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import capture as capturing  # noqa: E402
from klbench.insitu.capture import Capture  # noqa: E402
from tests.insitu.test_digest_capture import ARMED, NONCE, Mode, Model, decode, extend  # noqa: E402

BACKENDS = ["digest", "state", "dumper"]


class RadixAttention(torch.nn.Module):
    """Known by its name as what reads K and V."""

    sliding_window_size = -1
    layer_id = 0

    def forward(self, x: Any) -> Any:
        return x


class Attending(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attn = RadixAttention()


class Hooks:
    def remove(self) -> None: ...


class Dumper:
    """Writes a file a forward into the folder that it was last set to, as sglang's does."""

    may_enable = False

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.index = 0
        self._non_intrusives: list[Any] = []

    def configure(self, **settings: Any) -> None:
        self.config |= settings

    def get_state(self) -> dict[str, Any]:
        return {"dump_index": self.index, "config": self.config}

    def register_non_intrusive_dumper(self, _model: Any) -> Any:
        self._non_intrusives.append(hooks := Hooks())
        return hooks

    def dump(self, rids: list[str]) -> None:
        if self.config.get("enable"):
            place = Path(self.config["dir"]) / self.config["exp_name"]
            place.mkdir(exist_ok=True)
            (place / f"step={self.index}.pt").write_text("\n".join(rids))
            self.index += 1


class Rank:
    """One rank under capture by `backend`; `forward` runs a batch as sglang's runner does."""

    def __init__(self, folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dumper = Dumper()
        self.folder = folder / "captured"
        self.folder.mkdir(mode=0o700)
        self.model = Attending()
        monkeypatch.setattr(capturing, "_dumper", lambda: self.dumper)
        monkeypatch.setenv("KLBENCH_CPU_ENGINE", "1")
        pools = {"req_to_token_pool": SimpleNamespace(), "token_to_kv_pool": SimpleNamespace()}
        self.runner = SimpleNamespace(model=self.model, forward=self._forward, **pools)
        control = folder / "control"
        control.mkdir(mode=0o700)
        self.capture = Capture(self.runner, control, NONCE, 0)
        self.capture.wrap_forward()
        asked = {"folder": str(self.folder), "backend": backend, "free_floor_bytes": 0}
        self.capture._answer({"nonce": NONCE, "seq": 1, "capture": {**asked, "size_cap_bytes": 1 << 40}})
        answer = json.loads((control / "capture-ack-0.json").read_text())
        assert answer["ok"], answer["error"]

    def _forward(self, batch: Any) -> Any:
        self.dumper.dump(batch.rids)
        return batch

    @property
    def troubles(self) -> list[str]:
        return [file.read_text() for file in self.folder.glob("invalid-*.json")]


class Unreadable:
    """A tensor on a GPU whose stream is being captured: any value or any work of its own would end that."""

    device = SimpleNamespace(type="cuda")
    shape = (1,)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked of a tensor while its graph was captured")


def captured_batch() -> Any:
    return SimpleNamespace(
        rids=[ARMED],
        forward_mode=Mode(decode=False),
        input_ids=Unreadable(),
        positions=Unreadable(),
        seq_lens=Unreadable(),
        req_pool_indices=Unreadable(),
        extend_seq_lens_cpu=[1],
        extend_prefix_lens_cpu=[0],
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_while_a_graph_is_captured_no_value_is_read_no_module_hooked_and_nothing_switched_on(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, backend, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    batch = captured_batch()

    assert rank.runner.forward(batch) is batch

    assert rank.troubles == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in rank.model.modules())
    assert not rank.dumper.config.get("enable")
    assert rank.dumper.index == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_forward_is_looked_at_once_no_graph_is_captured(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, backend, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    rank.runner.forward(captured_batch())

    looked = {
        "digest": any(module._forward_hooks for module in rank.model.modules()),
        "state": "was asked of a tensor" in "".join(rank.troubles),
        "dumper": rank.dumper.index == 1,
    }
    assert looked[backend]


def test_the_forwards_of_two_arms_are_dumped_into_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, "dumper", monkeypatch)
    generated, scored = f"klb-{NONCE}-1g+-4", f"klb-{NONCE}-1s+-4"
    foreign = f"klb-{NONCE}-1g-5"

    for batch in (
        extend((generated, 0, [7, 3])),
        extend((foreign, 0, [1, 2])),
        decode((generated, 2, 9)),
        extend((scored, 0, [7, 3, 9])),
    ):
        rank.runner.forward(batch)

    places = sorted(path for path in rank.folder.iterdir() if path.is_dir())
    assert [path.name for path in places] == ["rank0-000000001", "rank0-000000003", "rank0-000000004"]
    said = [json.loads((path / "forward.json").read_text()) for path in places]
    assert [forward["requests"][0][0] for forward in said] == [generated, generated, scored]
    dumped = [[file.read_text() for file in path.glob("*.pt")] for path in places]
    assert dumped == [[generated], [generated], [scored]]
    assert [forward["files"] for forward in said] == [1, 1, 1]
    assert rank.dumper.config["cleanup_previous"] is False
    assert rank.troubles == []
