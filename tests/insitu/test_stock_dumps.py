"""What a server's own dumper wrote becomes the same trace as what our plugin has it write."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.core.trace import Phase, Trace  # noqa: E402
from klbench.engine.traces import read_trace  # noqa: E402
from klbench.insitu.dumps import convert  # noqa: E402

NONCE = "a1b2"
ATTENTION = "model.layers.0.self_attn.attn"
NORM = "model.layers.0.input_layernorm"


def rid(arm: str, request: int, armed: bool = False) -> str:
    return f"klb-{NONCE}-7{arm}{'+' if armed else ''}-{request}"


class StockDumper:
    """Writes forwards as sglang's dumper does when it is switched from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = 0
        self.step = 11
        self.place = folder / "klb-a1b2-7-x"
        self.place.mkdir(parents=True)
        about = {"nonce": NONCE, "exp_names": [self.place.name], "windows": {"0": 64}}
        (folder / "stock.json").write_text(json.dumps(about))

    def forward(
        self,
        requests: list[tuple[str, int, int]],
        *,
        drop: str = "",
        attention: str = ATTENTION,
        rank: int = 0,
    ) -> None:
        """`requests` are (id, first position, rows) in batch order."""
        positions = [p for _, first, rows in requests for p in range(first, first + rows)]
        rows = len(positions)
        tensors: list[tuple[str, Any]] = [
            ("input_ids", torch.tensor([100 + p for p in positions])),
            ("seq_lens", torch.tensor([first + rows for _, first, rows in requests])),
            ("positions", torch.tensor(positions)),
            ("rids", [name for name, _, _ in requests]),
            # What a module inside is given under the same name is not the forward's own.
            ("positions", torch.tensor([positions])),
            *((f"non_intrusive__{NORM}.{end}", torch.ones(rows, 4)) for end in ("inputs.0", "output")),
            *((f"non_intrusive__{attention}.inputs.{i}", torch.ones(rows, 4)) for i in range(3)),
            (f"non_intrusive__{attention}.output", torch.ones(rows, 4)),
        ]
        for name, value in tensors:
            if drop and drop in name:
                continue
            self.index += 1
            tags = f"step={self.step}___rank={rank}___dump_index={self.index}___name={name}"
            content = {"value": value, "meta": {"name": name, "dump_index": self.index}}
            torch.save(content, self.place / f"{tags}___recompute_status=disabled.pt")
        self.step += 1

    def trace(self) -> Trace:
        out = self.folder.parent / "trace"
        convert(self.folder, out)
        return read_trace(out)


@pytest.fixture
def dumper(tmp_path: Path) -> StockDumper:
    return StockDumper(tmp_path / "dumps")


def test_phases_and_rows_are_read_from_the_forwards_own_fields(dumper: StockDumper) -> None:
    mine, other = rid("g", 1, armed=True), rid("g", 0)
    dumper.forward([(other, 0, 5), (mine, 0, 4)])
    dumper.forward([(mine, 4, 3), ("HEALTH_CHECK_1", 0, 1)])
    dumper.forward([(other, 5, 1), (mine, 7, 1)])
    dumper.forward([(rid("g", 2), 0, 9)])
    warm = rid("s", 1, armed=True)
    dumper.forward([(warm, 6, 2)])

    trace = dumper.trace()

    assert trace.invalid is None
    found = {}
    for row, position in enumerate(trace.row_position.tolist()):
        number = int(trace.forward_number[trace.row_forward[row]])
        found.setdefault((number, Phase(int(trace.row_phase[row])).name), []).append(position)
    assert found == {
        (11, "EXTEND"): [0, 1, 2, 3],
        (12, "CHUNK"): [4, 5, 6],
        (13, "DECODE"): [7],
        (15, "RESTORED"): [6, 7],
    }
    assert trace.row_in_batch.tolist() == [5, 6, 7, 8, 0, 1, 2, 1, 0, 1]
    # A forward without the request is left as it was written.
    assert {path.name.split("___")[0] for path in dumper.place.glob("*.pt")} == {"step=14"}


def test_an_attention_is_known_by_its_name_and_reads_its_layers_window(dumper: StockDumper) -> None:
    dumper.forward([(rid("g", 1, armed=True), 0, 4)])
    states = {operator.module: (operator.state, operator.window) for operator in dumper.trace().operators}
    assert states == {ATTENTION: ("kv", 64), NORM: (None, None)}


@pytest.mark.parametrize(
    ("attention", "state"),
    [
        ("model.layers.0.linear_attn", "ssm"),
        ("model.layers.0.short_conv", "conv"),
        ("model.layers.0.self_attn.attn_mqa", "kv"),
    ],
)
def test_other_states_have_other_names(dumper: StockDumper, attention: str, state: str) -> None:
    dumper.forward([(rid("g", 1, armed=True), 0, 4)], attention=attention)
    assert {op.module: op.state for op in dumper.trace().operators}[attention] == state


def test_a_layer_in_which_no_state_can_be_told_makes_the_trace_invalid(dumper: StockDumper) -> None:
    dumper.forward([(rid("g", 1, armed=True), 0, 4)], attention="model.layers.0.mystery")
    assert "no module of layer 0 can be told to read state" in str(dumper.trace().invalid)


@pytest.mark.parametrize(
    ("drop", "reason"),
    [("rids", "lack rids"), ("seq_lens", "lack seq_lens"), ("non_intrusive__", "no module's tensors")],
)
def test_a_forward_that_cannot_be_read_makes_the_trace_invalid(
    dumper: StockDumper, drop: str, reason: str
) -> None:
    dumper.forward([(rid("g", 1, armed=True), 0, 4)])
    dumper.forward([(rid("g", 1, armed=True), 4, 1)], drop=drop)
    assert reason in str(dumper.trace().invalid)


def test_each_rank_has_its_own_trace(dumper: StockDumper) -> None:
    for rank in (0, 1):
        dumper.step = 3
        dumper.forward([(rid("g", 1, armed=True), 0, 4)], rank=rank)
    trace = dumper.trace()
    assert sorted(trace.forward_rank.tolist()) == [0, 1]
