"""Exports: the folder stands alone, and its script tells the truth about what torch does with its tensors."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from klbench.core.census import row_counts  # noqa: E402
from klbench.engine.export import export_origin  # noqa: E402
from klbench.engine.export_script import restated  # noqa: E402
from klbench.engine.raw_tensors import read_raw, row_tensor, write_raw  # noqa: E402
from klbench.engine.ulp_rows import ORIGIN_ROWS  # noqa: E402
from klbench.errors import UndecidedError  # noqa: E402
from klbench.insitu.replay_operator import Kept, Replayed, replay_operator  # noqa: E402
from klbench.insitu.row_cuts import taken, tensors_in  # noqa: E402

ROWS, WIDTH, OUT = 13, 16, 8
FINDING = {
    "kind": "operator",
    "module": 'model.layers.1.o_proj"""',
    "rank": 0,
    "request": 2,
    "positions": {"first": 5},
    "replay_M": 4,
}


class RowParallelLinear(torch.nn.Linear):
    """Rounds differently from 4 rows on, unless it is honest."""

    honest = False

    def forward(self, input_):
        if self.honest or input_.shape[0] < 4:
            return super().forward(input_), None
        half = WIDTH // 2
        left = torch.nn.functional.linear(input_[:, :half], self.weight[:, :half])
        return left + torch.nn.functional.linear(input_[:, half:], self.weight[:, half:]), None


class RMSNorm(torch.nn.Module):
    """Adds its residual; wrong from 4 rows on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, WIDTH).bfloat16())
        self.variance_epsilon = 1e-6

    def forward(self, x, residual):
        total = x + residual
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        output = wide.to(x.dtype) * self.weight
        return (output if x.shape[0] < 4 else output * 1.0625), total


@pytest.fixture
def trace_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "trace-1"
    folder.mkdir()
    return folder


def replay_into(trace_dir: Path, module, inputs, keep_bytes: int = 1 << 20) -> None:
    """What a server leaves beside the trace when it replays the module on these inputs."""
    place = trace_dir.with_name("trace-1-replay-0") / "carrier-1"
    place.mkdir(parents=True)
    operator = Replayed(FINDING["module"], 0, type(module).__name__)
    with torch.no_grad():
        replay_operator(
            operator,
            lambda index: module(**taken(inputs, ROWS, index)),
            module(**inputs),
            total=ROWS,
            judged=[5],
            tried=[*row_counts(8), ROWS],
            device="cpu",
        )
        kept = Kept(keep_bytes)
        kept.add(0, tensors_in(({}, inputs)), module, operator)
    rows = operator.different_rows()
    dtypes = {"dtypes": json.dumps({f"0/{name}": dtype for name, (dtype, _) in rows.items()})}
    tensors = {f"0/{name}": row for name, (_, row) in rows.items()}
    save_file(tensors, place / "rows-0.safetensors", metadata=dtypes)
    save_file(kept.tensors, place / "kept-0.safetensors", metadata={"about": json.dumps(kept.about)})
    result = {"nonce": "a", "rank": 0, "carrier": "c", "error": None, "rows": ROWS, "total": 1}
    result["operators"] = [operator.as_dict()]
    (place / "replay-0.json").write_text(json.dumps(result))


def linear_inputs():
    torch.manual_seed(3)
    return {"input_": torch.randn(ROWS, WIDTH).bfloat16()}


def shown(folder: Path) -> str:
    """What the script prints, run alone in its folder."""
    done = subprocess.run(
        [sys.executable, "-I", "show.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_script_of_a_linear_layer_does_its_sum_again(trace_dir: Path, tmp_path: Path) -> None:
    replay_into(trace_dir, RowParallelLinear(WIDTH, OUT, bias=False).bfloat16(), linear_inputs())
    done = export_origin(FINDING, 0, trace_dir, tmp_path / "export")

    assert done.restated
    text = shown(done.folder)
    lines = {int(line.split()[0]): line for line in text.splitlines() if " rows: server" in line}
    assert sorted(lines) == [1, 2, 3, 4, 8, ROWS]
    assert all("server    0," in lines[m] for m in (1, 2, 3))
    assert all("server    0," not in lines[m] for m in (4, 8, ROWS))
    assert "with 1 row plain torch gives the server's bits" in text
    assert all("plain torch here    0;" in line for line in lines.values())
    assert "does not depend on the number of rows" in text


def test_the_tensors_of_an_export_are_those_of_the_server(trace_dir: Path, tmp_path: Path) -> None:
    module, inputs = RowParallelLinear(WIDTH, OUT, bias=False).bfloat16(), linear_inputs()
    replay_into(trace_dir, module, inputs)
    done = export_origin(FINDING, 0, trace_dir, tmp_path / "export")

    tensors = load_file(done.folder / "tensors.safetensors")
    assert torch.equal(tensors["input.input_"], inputs["input_"])
    assert torch.equal(tensors["weight.weight"], module.weight)
    alone = module(inputs["input_"][5:6])[0][0]
    assert torch.equal(tensors["output.0.variant-0"], alone)
    about = json.loads((done.folder / "origin.json").read_text())["about"]
    assert (about["row"], about["rows"], about["class"]) == (5, ROWS, "RowParallelLinear")


def test_a_large_weight_is_cut_and_the_script_still_does_its_sum(trace_dir: Path, tmp_path: Path) -> None:
    module = RowParallelLinear(WIDTH, 4000, bias=False).bfloat16()
    replay_into(trace_dir, module, linear_inputs(), keep_bytes=20_000)
    done = export_origin(FINDING, 0, trace_dir, tmp_path / "export")

    assert 0 < load_file(done.folder / "tensors.safetensors")["weight.weight"].shape[0] <= 64
    assert "with 1 row plain torch gives the server's bits" in shown(done.folder)


def test_a_norm_with_a_residual_is_restated(trace_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(4)
    inputs = {name: torch.randn(ROWS, WIDTH).bfloat16() for name in ("x", "residual")}
    replay_into(trace_dir, RMSNorm(), inputs)
    done = export_origin(FINDING, 0, trace_dir, tmp_path / "export")

    assert done.restated
    assert "with 1 row plain torch gives the server's bits" in shown(done.folder)


def test_an_operator_that_is_not_restated_compares_the_recorded_outputs(
    trace_dir: Path, tmp_path: Path
) -> None:
    class FusedMoE(RowParallelLinear):
        pass

    replay_into(trace_dir, FusedMoE(WIDTH, OUT, bias=False).bfloat16(), linear_inputs())
    done = export_origin(FINDING, 0, trace_dir, tmp_path / "export")

    assert not done.restated
    text = shown(done.folder)
    assert f"of {OUT} elements differ from 1 row" in text
    assert "not done again here: a FusedMoE is more than a few lines" in text


def test_an_origin_that_cannot_be_replayed_shows_the_rows_of_both_arms(
    trace_dir: Path, tmp_path: Path
) -> None:
    a, b = (np.array(row, dtype="float32").tobytes() for row in ([1, 2], [1, 3]))
    rows = {
        "0/in.q/a": row_tensor("float32", a),
        "0/in.q/b": row_tensor("float32", a),
        "0/out.0/a": row_tensor("float32", a),
        "0/out.0/b": row_tensor("float32", b),
    }
    write_raw(trace_dir / ORIGIN_ROWS, rows)
    done = export_origin(FINDING, 0, trace_dir, tmp_path / "export")

    text = shown(done.folder)
    assert "in.q: 0 of 2 elements differ" in text
    assert "out.0: 1 of 2 elements differ, by 1 at most" in text
    assert "not called again alone" in text


def test_an_invariant_operator_falls_back_to_the_arms_and_without_rows_says_so(
    trace_dir: Path, tmp_path: Path
) -> None:
    module = RowParallelLinear(WIDTH, OUT, bias=False).bfloat16()
    module.honest = True
    replay_into(trace_dir, module, linear_inputs())
    with pytest.raises(UndecidedError, match="no tensors") as caught:
        export_origin(FINDING, 0, trace_dir, tmp_path / "export")
    assert "same bits" in caught.value.why
    assert not (tmp_path / "export").exists()


def test_a_name_that_would_be_code_never_reaches_the_script(trace_dir: Path, tmp_path: Path) -> None:
    class Named(torch.nn.Linear):
        def forward(self, **inputs):
            (x,) = inputs.values()
            return super().forward(x) * (1 if x.shape[0] < 4 else 2), None

    inputs = {'x"], print("owned"), t["x': linear_inputs()["input_"]}
    replay_into(trace_dir, Named(WIDTH, OUT, bias=False).bfloat16(), inputs)
    with pytest.raises(UndecidedError, match="no tensors") as caught:
        export_origin(FINDING, 0, trace_dir, tmp_path / "export")
    assert "odd names" in caught.value.why


@pytest.mark.parametrize(
    ("class_name", "tensors"),
    [
        ("RowParallelLinear", ["input.x", "weight.qweight", "weight.scales"]),
        ("RMSNorm", ["input.x", "weight.weight"]),
        ("TopK", ["input.x"]),
    ],
)
def test_what_is_more_than_a_few_lines_is_not_restated(class_name: str, tensors: list[str]) -> None:
    assert isinstance(restated(class_name, tensors, {}), str)


def test_raw_tensors_are_read_back_as_they_were(tmp_path: Path) -> None:
    values = {"a": torch.randn(3, 2).bfloat16(), "b": torch.tensor([True, False]), "c": torch.zeros(0, 4)}
    save_file(values, tmp_path / "in.safetensors", metadata={"x": "y"})
    tensors, metadata = read_raw(tmp_path / "in.safetensors")
    write_raw(tmp_path / "out.safetensors", tensors, metadata)
    again = load_file(tmp_path / "out.safetensors")
    assert metadata == {"x": "y"}
    assert all(torch.equal(again[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": 7}',
        b"[]",
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    with pytest.raises(UndecidedError, match="cannot be read"):
        read_raw(path)
