"""The parameters of gated delta rules beside the dumps: of no other module, and only if they are small."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402

from klbench.insitu import parameters  # noqa: E402
from klbench.insitu.parameters import write_parameters  # noqa: E402
from tests.insitu import test_capture_switch as switch  # noqa: E402
from tests.insitu.test_digest_capture import NONCE, extend  # noqa: E402

KEYS, VALUES, DEPTH, WIDTH = 2, 4, 8, 4
CHANNELS = 2 * KEYS * DEPTH + VALUES * DEPTH
SIZES = {
    "num_q_heads": KEYS,
    "num_k_heads": KEYS,
    "num_v_heads": VALUES,
    "head_q_dim": DEPTH,
    "head_k_dim": DEPTH,
    "head_v_dim": DEPTH,
}


class RadixLinearAttention(torch.nn.Module):
    """The attributes of sglang's, whose tensors are those of the modules around it."""

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        given = {
            **SIZES,
            "conv_weights": torch.randn(CHANNELS, 1, WIDTH).bfloat16().squeeze(1),
            "bias": None,
            "activation": "silu",
            "A_log": torch.nn.Parameter(torch.randn(VALUES)),
            "dt_bias": torch.nn.Parameter(torch.randn(VALUES).bfloat16()),
            "lower_bound": None,
            **changed,
        }
        for name, value in given.items():
            setattr(self, name, value)

    def forward(self, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any) -> Any:  # noqa: ARG002
        return mixed_qkv


class Mixer(torch.nn.Module):
    def __init__(self, **changed: Any) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(8, 8)
        self.attn = RadixLinearAttention(**changed)


def written(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, json.loads(file.metadata()["modules"])


@pytest.mark.parametrize("bias", [False, True])
def test_what_the_recurrence_needs_is_written_as_the_module_has_it(bias: bool, tmp_path: Path) -> None:
    its = torch.nn.Parameter(torch.randn(CHANNELS).bfloat16()) if bias else None
    mixer, path = Mixer(bias=its), tmp_path / "parameters-0.safetensors"

    assert write_parameters(torch.nn.ModuleList([mixer]), None, path) == 1

    tensors, modules = written(path)
    assert modules == {"0.attn": {**SIZES, "activation": "silu"}}
    own = ["A_log", "conv_weights", "dt_bias", *(["bias"] if bias else [])]
    assert sorted(tensors) == sorted(f"0.attn/{name}" for name in own)
    for name in own:
        assert torch.equal(tensors[f"0.attn/{name}"], getattr(mixer.attn, name))


def test_only_modules_that_the_dumper_is_asked_for_are_written(tmp_path: Path) -> None:
    model, path = torch.nn.ModuleList([Mixer(), Mixer()]), tmp_path / "parameters-0.safetensors"

    assert write_parameters(model, r"^non_intrusive__(1\.attn)\.(inputs|output)", path) == 1

    assert list(written(path)[1]) == ["1.attn"]
    path.unlink()
    assert write_parameters(model, r"^non_intrusive__(1\.in_proj)\.(inputs|output)", path) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    "changed",
    [
        # One gate for each channel of a key.
        {"dt_bias": torch.zeros(VALUES * DEPTH)},
        {"lower_bound": -5.0},
        {"A_log": None},
        {"conv_weights": (torch.zeros(4, 4),) * 3},
        {"conv_weights": torch.zeros(CHANNELS + 1, WIDTH)},
        {"bias": (torch.zeros(4),) * 3},
        {"num_k_heads": None},
    ],
    ids=str,
)
def test_another_operator_is_left_out(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "parameters-0.safetensors"
    assert write_parameters(torch.nn.ModuleList([Mixer(**changed)]), None, path) == 0
    assert not path.exists()


def test_what_is_not_small_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = CHANNELS * WIDTH * 2 + VALUES * 6
    monkeypatch.setattr(parameters, "_MOST_BYTES", 2 * one)
    path = tmp_path / "parameters-0.safetensors"
    assert write_parameters(torch.nn.ModuleList([Mixer() for _ in range(3)]), None, path) == 2
    assert list(written(path)[1]) == ["0.attn", "1.attn"]


def test_sglangs_own_module_is_known_by_these_attributes() -> None:
    """A renamed one would be left out without a word."""
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not installed")
    file = Path(found.submodule_search_locations[0]) / "srt" / "layers" / "radix_linear_attention.py"
    source = file.read_text(encoding="utf-8")
    for name in (*SIZES, "conv_weights", "bias", "activation", "A_log", "dt_bias", "lower_bound"):
        assert f"self.{name} = " in source


@pytest.mark.parametrize("backend", ["dumper", "digest"])
def test_they_lie_beside_the_dumps_of_a_capture(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recurrent(switch.Attending):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Mixer()

    monkeypatch.setattr(switch, "Attending", Recurrent)
    rank = switch.Rank(tmp_path, backend, monkeypatch)
    rank.runner.forward(extend((f"klb-{NONCE}-1g+-4", 0, [7, 3])))

    path = rank.folder / "parameters-0.safetensors"
    assert path.exists() == (backend == "dumper")
    if backend == "dumper":
        assert list(written(path)[1]) == ["mixer.attn"]
