"""Dump files of the stock dumper become a trace: the right rows, the right names, and nothing is executed."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from klbench.core.trace import Arm, Direction, Phase, Trace  # noqa: E402
from klbench.engine.traces import read_rows, read_trace  # noqa: E402
from klbench.insitu.digest import digest_rows  # noqa: E402
from klbench.insitu.dump_files import Name, parse_name  # noqa: E402
from klbench.insitu.dumps import IN, OUT, convert, fetch_rows  # noqa: E402

NONCE = "a1b2"
LAYER = "model.layers.0"


class DumpFolder:
    """Writes forwards as capture.py and the dumper do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = 0

    def forward(
        self, number: int, mode: str, requests: list[list[Any]], tensors: list[tuple[str, Any]]
    ) -> Path:
        """Core fields first, then the given tensors; a name may carry its layer as "name@2"."""
        place = self.folder / f"rank0-{number:09d}"
        place.mkdir(parents=True)
        positions = [p for _, first, rows, *_ in requests for p in range(first, first + rows)]
        core = [
            ("input_ids", torch.tensor([100 + p for p in positions])),
            ("seq_lens", torch.tensor([request[4] for request in requests])),
            ("positions", torch.tensor(positions)),
            ("rids", [request[0] for request in requests]),
        ]
        for name, value in [*core, *tensors]:
            self.index += 1
            name, _, layer = name.partition("@")
            meta: dict[str, Any] = {"name": name, "dump_index": self.index}
            if layer:
                meta["layer_id"] = int(layer)
            tags = f"step=0___rank=0___dump_index={self.index}___name={name}___recompute_status=disabled"
            tags += f"___layer_id={layer}" if layer else ""
            torch.save({"value": value, "meta": meta}, place / f"{tags}.pt")
        about = {
            "n": number,
            "mode": mode,
            "rows": len(positions),
            "requests": requests,
            "rank": 0,
            "nonce": NONCE,
            "expected_files": len(core) + len(tensors),
            "files": len(core) + len(tensors),
            "bytes": 1000,
        }
        (place / "forward.json").write_text(json.dumps(about))
        return place

    def trace(self) -> Trace:
        out = self.folder.parent / "trace"
        convert(self.folder, out)
        return read_trace(out)


@pytest.fixture
def dumps(tmp_path: Path) -> DumpFolder:
    (tmp_path / "dumps").mkdir()
    modules = {f"{LAYER}.attn": {"class": "RadixAttention", "state": "kv", "window": 64}}
    (tmp_path / "dumps" / "modules-0.json").write_text(json.dumps(modules))
    return DumpFolder(tmp_path / "dumps")


def mine(rows: int, first: int = 0, phase: str = "extend", arm: str = "g") -> list[Any]:
    return [f"klb-{NONCE}-1{arm}+-3", first, rows, first, first + rows, phase]


def foreign(rows: int) -> list[Any]:
    return ["", 0, rows, 0, rows, "extend"]


def digests_of(trace: Trace, module: str, direction: Direction = Direction.OUT) -> np.ndarray:
    number = next(i for i, op in enumerate(trace.operators) if op.module == module)
    found = np.flatnonzero((trace.tensor_operator == number) & (trace.tensor_direction == direction))
    return np.concatenate(
        [trace.digest[trace.tensor_start[t] : trace.tensor_start[t] + trace.tensor_rows[t]] for t in found]
    )


def digest(tensor: Any, rows: int) -> np.ndarray:
    return digest_rows(tensor, rows).numpy().view(np.uint64)


@pytest.mark.parametrize(
    ("text", "layer", "name"),
    [
        ("model.norm.output", None, Name("model.norm", OUT, "0")),
        ("model.norm.output.0", None, Name("model.norm", OUT, "0")),
        ("model.norm.output.1", None, Name("model.norm", OUT, "1")),
        (
            "model.layers.2.self_attn.inputs.hidden_states",
            2,
            Name("model.layers.2.self_attn", IN, "hidden_states"),
        ),
        ("model.norm.inputs.1.0", None, Name("model.norm", IN, "1")),
        ("model.norm.inputs.1.2", None, Name("model.norm", IN, "1.2")),
        ("inputs.0", None, Name("", IN, "0")),
        ("output.next_token_logits", None, Name("", OUT, "next_token_logits")),
        ("gate.inputs.output", None, Name("gate", IN, "output")),
        ("model.layers.0.rotary_emb.output.1", 3, Name("model.layers.3.rotary_emb", OUT, "1")),
    ],
)
def test_names_of_one_tensor_and_of_several_and_of_shared_modules_are_one_name(
    text: str, layer: int | None, name: Name
) -> None:
    assert parse_name(f"non_intrusive__{text}", layer) == name


def test_core_fields_are_no_operators() -> None:
    assert parse_name("positions", 2) is None


def test_attention_that_ran_past_the_hooks_stands_in_the_trace_without_anything(dumps: DumpFolder) -> None:
    dumps.forward(5, "extend", [mine(3)], [(f"non_intrusive__{LAYER}.o.output", torch.randn(3, 16))])
    trace = dumps.trace()

    assert [(operator.module, operator.state) for operator in trace.operators] == [
        (f"{LAYER}.o", None),
        (f"{LAYER}.attn", "kv"),
    ]
    assert set(trace.tensor_operator.tolist()) == {0}
    about = json.loads((dumps.folder.parent / "trace" / "rank0.json").read_text())
    assert about["not_observed"] == [f"{LAYER}.attn: it was not called as a module"]


def test_only_rows_of_armed_requests_are_digested_and_mapped_to_their_positions(dumps: DumpFolder) -> None:
    x = torch.randn(7, 16).bfloat16()
    dumps.forward(5, "extend", [foreign(4), mine(3)], [(f"non_intrusive__{LAYER}.o.output", x)])
    trace = dumps.trace()

    assert trace.row_position.tolist() == [0, 1, 2]
    assert trace.row_in_batch.tolist() == [4, 5, 6]
    assert trace.row_request.tolist() == [3, 3, 3]
    assert trace.row_token.tolist() == [100, 101, 102]
    assert trace.row_arm.tolist() == [Arm.GENERATION] * 3
    assert trace.forward_rows.tolist() == [7]
    np.testing.assert_array_equal(digests_of(trace, f"{LAYER}.o"), digest(x[4:], 3))


def test_heads_are_folded_to_rows_and_all_else_is_digested_whole(dumps: DumpFolder) -> None:
    heads, table = torch.randn(6, 8), torch.randn(5, 2)
    tensors = [
        (f"non_intrusive__{LAYER}.q_norm.output", heads),
        (f"non_intrusive__{LAYER}.odd.output", table),
        (f"non_intrusive__{LAYER}.scalar.output", torch.tensor(2.5)),
    ]
    batch_of_one = torch.randn(1, 3, 4)
    tensors.append((f"non_intrusive__{LAYER}.rotary.output", batch_of_one))
    dumps.forward(1, "extend", [mine(3)], tensors)
    trace = dumps.trace()

    np.testing.assert_array_equal(digests_of(trace, f"{LAYER}.q_norm"), digest(heads.reshape(3, 16), 3))
    np.testing.assert_array_equal(digests_of(trace, f"{LAYER}.rotary"), digest(batch_of_one[0], 3))
    np.testing.assert_array_equal(digests_of(trace, f"{LAYER}.odd"), digest(table, 1))
    whole = trace.tensor_row[trace.tensor_start[trace.tensor_rows == 1]]
    assert whole.tolist() == [-1, -1]


def test_phases_arms_and_state_come_with_the_rows(dumps: DumpFolder) -> None:
    x = [(f"non_intrusive__{LAYER}.attn.output", torch.randn(1, 4))]
    dumps.forward(1, "extend", [mine(1, 9, "restored")], x)
    dumps.forward(2, "decode", [mine(1, 10, "decode")], x)
    dumps.forward(3, "extend", [mine(1, 0, "extend", arm="s")], x)
    trace = dumps.trace()

    assert trace.row_phase.tolist() == [Phase.RESTORED, Phase.DECODE, Phase.EXTEND]
    assert trace.row_arm.tolist() == [Arm.GENERATION, Arm.GENERATION, Arm.SCORING]
    assert trace.forward_number.tolist() == [1, 2, 3]
    (attention,) = trace.operators
    assert (attention.class_name, attention.state, attention.window) == ("RadixAttention", "kv", 64)
    assert not trace.observes_state
    assert trace.invalid is None


def test_a_module_called_twice_is_two_call_sites_in_order(dumps: DumpFolder) -> None:
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    tensors = [
        ("non_intrusive__shared.inputs.0", a),
        ("non_intrusive__shared.output", b),
        ("non_intrusive__shared.inputs.0", b),
        ("non_intrusive__shared.output", a),
    ]
    dumps.forward(1, "extend", [mine(2)], tensors)
    trace = dumps.trace()

    assert [(op.module, op.call) for op in trace.operators] == [("shared", 0), ("shared", 1)]
    assert trace.tensor_event.tolist() == [0, 1, 2, 3]


def test_a_shared_module_is_named_for_the_layer_that_calls_it_also_when_rows_are_fetched(
    dumps: DumpFolder, tmp_path: Path
) -> None:
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    rotary = "non_intrusive__model.layers.0.rotary.output"
    dumps.forward(1, "extend", [mine(2)], [(f"{rotary}@0", a), (f"{rotary}@1", b)])
    trace = dumps.trace()

    called = [op.module for op in trace.operators if op.state is None]
    assert called == ["model.layers.0.rotary", "model.layers.1.rotary"]
    np.testing.assert_array_equal(digests_of(trace, "model.layers.1.rotary"), digest(b, 2))
    want = {"key": "b", "rank": 0, "forward": 1, "module": "model.layers.1.rotary", "call": 0}
    want |= {"direction": OUT, "argument": "0", "row_in_batch": 1}
    fetch_rows(dumps.folder, [want], tmp_path / "rows.safetensors")
    assert read_rows(tmp_path / "rows.safetensors")["b"][1].tobytes() == b[1].numpy().tobytes()


def test_a_module_with_children_is_a_container(dumps: DumpFolder) -> None:
    x = torch.randn(2, 4)
    names = ["inputs.0", f"{LAYER}.inputs.0", f"{LAYER}.o.output", f"{LAYER}.output", "output.x"]
    dumps.forward(1, "extend", [mine(2)], [(f"non_intrusive__{name}", x) for name in names])
    trace = dumps.trace()

    containers = {op.module: op.container for op in trace.operators if op.state is None}
    assert containers == {"": True, LAYER: True, f"{LAYER}.o": False}


class RunsCode:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_a_file_that_would_run_code_is_not_run_and_makes_the_trace_invalid(
    dumps: DumpFolder, tmp_path: Path
) -> None:
    place = dumps.forward(1, "extend", [mine(2)], [(f"non_intrusive__{LAYER}.o.output", torch.randn(2, 4))])
    victim = sorted(place.glob("*.pt"))[-1]
    target = tmp_path / "executed"
    victim.write_bytes(pickle.dumps(RunsCode(target)))

    trace = dumps.trace()

    assert not target.exists()
    assert trace.invalid is not None
    assert victim.name in trace.invalid


def test_a_file_that_the_dumper_failed_to_write_is_noticed(dumps: DumpFolder) -> None:
    place = dumps.forward(1, "extend", [mine(2)], [(f"non_intrusive__{LAYER}.o.output", torch.randn(2, 4))])
    sorted(place.glob("*.pt"))[-1].unlink()

    assert "4 of 5 files" in str(dumps.trace().invalid)


def test_rows_at_other_positions_than_the_composition_says_are_noticed(dumps: DumpFolder) -> None:
    place = dumps.forward(1, "extend", [mine(2)], [])
    about = json.loads((place / "forward.json").read_text())
    about["requests"][0][1] = 5
    (place / "forward.json").write_text(json.dumps(about))

    assert "elsewhere" in str(dumps.trace().invalid)


def test_what_the_server_called_invalid_stays_invalid(dumps: DumpFolder) -> None:
    dumps.forward(1, "extend", [mine(2)], [])
    (dumps.folder / "invalid-0.json").write_text(json.dumps({"what": "OSError: no space left"}))

    assert dumps.trace().invalid == "OSError: no space left"


def test_raw_rows_are_fetched_bit_for_bit_folded_as_they_were_digested(
    dumps: DumpFolder, tmp_path: Path
) -> None:
    heads = torch.randn(6, 8).bfloat16()
    dumps.forward(4, "extend", [mine(3)], [(f"non_intrusive__{LAYER}.q_norm.output.0", heads)])
    want = {
        "key": "a",
        "rank": 0,
        "forward": 4,
        "module": f"{LAYER}.q_norm",
        "call": 0,
        "direction": OUT,
        "argument": "0",
        "row_in_batch": 2,
    }

    found = fetch_rows(
        dumps.folder, [want, want | {"key": "b", "row_in_batch": 9}], tmp_path / "rows.safetensors"
    )

    assert found == 1
    rows = read_rows(tmp_path / "rows.safetensors")
    assert rows.keys() == {"a"}
    assert rows["a"][0] == "bfloat16"
    assert rows["a"][1].tobytes() == heads.reshape(3, 16)[2].view(torch.uint8).numpy().tobytes()


def test_a_tensor_that_one_forward_shows_to_have_no_rows_has_none_in_any_later_one(
    dumps: DumpFolder, tmp_path: Path
) -> None:
    """The sinks of an attention: as many as heads, which is a multiple of a decode's rows."""
    sinks, name = torch.arange(4.0), f"non_intrusive__{LAYER}.attn.inputs.sinks"
    dumps.forward(4, "extend", [mine(2)], [(name, sinks)])
    dumps.forward(5, "extend", [mine(3)], [(name, sinks)])
    dumps.forward(6, "decode", [mine(1, first=3, phase="decode"), foreign(1)], [(name, sinks)])

    trace = dumps.trace()

    # What came before is not known yet; localisation leaves it out.
    assert (trace.tensor_row < 0).tolist() == [False, False, True, True]
    assert [trace.digest[place].tolist() for place in (2, 3)] == [digest(sinks, 1)[0].tolist()] * 2
    wanted = [
        {
            "key": str(forward),
            "rank": 0,
            "forward": forward,
            "module": f"{LAYER}.attn",
            "call": 0,
            "direction": IN,
            "argument": "sinks",
            "row_in_batch": 0,
        }
        for forward in (4, 5)
    ]
    assert fetch_rows(dumps.folder, wanted, tmp_path / "rows.safetensors") == 0
    assert fetch_rows(dumps.folder, wanted[:1], tmp_path / "rows.safetensors") == 1


def test_a_weight_has_no_rows(dumps: DumpFolder) -> None:
    sinks = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    dumps.forward(4, "extend", [mine(2)], [(f"non_intrusive__{LAYER}.attn.inputs.sinks", sinks)])

    assert dumps.trace().tensor_row.tolist() == [-1]
