"""A trace folder is read whole or refused with the file that is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from klbench.engine.traces import read_rows, read_trace  # noqa: E402
from klbench.errors import KlbenchError  # noqa: E402
from klbench.insitu.trace_writer import OUT, TraceWriter  # noqa: E402


def write(folder: Path, rank: int = 0, close: bool = True, shards: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    writer = TraceWriter(folder, rank, "a1b2", "dumper")
    for number in range(shards):
        forward = writer.add_forward(number + 1, 2, 1)
        rows = [writer.add_row(forward, "generation", 0, p, p, "extend", 7) for p in (0, 1)]
        for module in ("model", "model.norm"):
            writer.add_tensor(
                forward=forward,
                operator=writer.operator(module, 0, "Module", None, None),
                direction=OUT,
                argument=writer.argument("0"),
                dtype=writer.dtype("bfloat16"),
                row_bytes=8,
                event=0,
                rows=rows,
                digests=torch.tensor([[rank, -1], [number, 2]]),
            )
        if number + 1 < shards:
            writer.flush()
    if close:
        writer.close(observes_state=False, observes_head=False, invalid=None)
    else:
        writer.flush()


def shard(folder: Path) -> Path:
    return folder / "rank0-000001.safetensors"


def test_shards_and_ranks_are_joined_with_their_indices(tmp_path: Path) -> None:
    write(tmp_path, rank=0, shards=2)
    write(tmp_path, rank=1)
    trace = read_trace(tmp_path)

    assert trace.forward_rank.tolist() == [0, 0, 1]
    assert trace.row_forward.tolist() == [0, 0, 1, 1, 2, 2]
    assert [op.module for op in trace.operators] == ["model", "model.norm"]
    assert [op.container for op in trace.operators] == [True, False]
    assert trace.tensor_start.tolist() == [0, 2, 4, 6, 8, 10]
    assert trace.tensor_row.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert trace.digest[8].tolist() == [1, 2**64 - 1]
    assert trace.invalid is None


def test_rows_of_the_heads_calls_are_joined_with_their_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = TraceWriter(tmp_path, rank, "a1b2", "digest")
        forward = writer.add_forward(1, 40, 32)
        rows = [writer.add_row(forward, "generation", 0, at, at, "extend", 7) for at in (0, 1)]
        writer.add_columns("head", torch.tensor([[rows[1], 32 + rank]]))
        writer.close(observes_state=False, observes_head=True, invalid=None)
    trace = read_trace(tmp_path)

    assert (trace.head_row.tolist(), trace.head_rows.tolist()) == ([1, 3], [32, 33])


def test_a_trace_without_its_last_word_was_cut(tmp_path: Path) -> None:
    write(tmp_path, close=False)

    assert "cut" in str(read_trace(tmp_path).invalid)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    shard(tmp_path).unlink()

    with pytest.raises(KlbenchError, match=r"rank0\.json") as caught:
        read_trace(tmp_path)
    assert "[2]" in caught.value.why


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 60, 400, -1])
def test_a_shard_cut_at_any_byte_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    write(tmp_path)
    data = shard(tmp_path).read_bytes()
    shard(tmp_path).write_bytes(data[:kept])

    with pytest.raises(KlbenchError, match="rank0-000001"):
        read_trace(tmp_path)


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    shard(tmp_path).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")

    with pytest.raises(KlbenchError, match="rank0-000001"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("row_forward", 99),
        ("tensor_operator", -1),
        ("tensor_row", 1000),
        ("tensor_row", -2),
        ("row_arm", 3),
        ("row_phase", 9),
        ("tensor_start", 5),
        ("tensor_rows", 3),
    ],
)
def test_an_index_outside_its_table_is_refused(tmp_path: Path, column: str, value: int) -> None:
    write(tmp_path)
    metadata, tensors = contents(shard(tmp_path))
    tensors[column] = tensors[column].long()
    tensors[column][0] = value
    save_file(tensors, shard(tmp_path), metadata)

    with pytest.raises(KlbenchError, match="rank0"):
        read_trace(tmp_path)


def contents(path: Path) -> tuple[dict[str, str], dict[str, "torch.Tensor"]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata()), load_file(path)


@pytest.mark.parametrize("name", ["operators", "schema", "arguments"])
def test_metadata_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    metadata, tensors = contents(shard(tmp_path))
    save_file(tensors, shard(tmp_path), metadata | {name: '{"a": [' * 2000})

    with pytest.raises(KlbenchError, match="rank0-000001"):
        read_trace(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 3}', "[" * 100_000, '{"schema": "other/1"}'])
def test_a_damaged_rank_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "rank0.json").write_text(text)

    with pytest.raises(KlbenchError, match=r"rank0\.json"):
        read_trace(tmp_path)


def test_a_folder_without_a_trace_and_an_absent_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KlbenchError, match="cannot be used"):
        read_trace(tmp_path)
    with pytest.raises(KlbenchError, match="absent"):
        read_trace(tmp_path / "absent")


def test_rows_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.safetensors").write_text("no")
    with pytest.raises(KlbenchError, match=r"rows\.safetensors"):
        read_rows(tmp_path / "rows.safetensors")

    save_file({"a": torch.zeros(2)}, tmp_path / "rows.safetensors", {"dtypes": json.dumps({"a": "float32"})})
    assert read_rows(tmp_path / "rows.safetensors")["a"][1].dtype == np.uint8
