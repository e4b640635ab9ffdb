"""Replays on a small model of our own: what is called again, what is judged, and what the server keeps.

The runner and its batch are the few fields that replays read.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from klbench.engine.replay import decode_result  # noqa: E402
from klbench.engine.traces import read_rows  # noqa: E402
from klbench.insitu import row_cuts  # noqa: E402
from klbench.insitu.plugin import write_json_atomically  # noqa: E402
from klbench.insitu.replay import CONTROL, Replays, judged_rows  # noqa: E402
from klbench.insitu.replay_forward import Asked  # noqa: E402

NONCE = "a1b2"
WIDTH, HEADS = 8, 2
ROWS = 37
CARRIER = "klb-a1b2-1s-0"


class Pair(NamedTuple):
    x: Any
    scale: float


class Invariant(torch.nn.Module):
    """Row by row, with an input that it changes in place."""

    def forward(self, x: Any, residual: Any) -> Any:
        residual.add_(x)
        return residual * 2, residual


class ByRows(torch.nn.Module):
    """Other bits from 16 rows on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.eps = 0.5

    def forward(self, pair: Pair) -> Any:
        return pair.x * (3.0 if pair.x.shape[0] < 16 else 3.5) * pair.scale, None


class Heads(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1


class Counting(torch.nn.Module):
    """Gives something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


class TakesBatch(torch.nn.Module):
    def forward(self, x: Any, batch: Any) -> Any:  # noqa: ARG002
        return x


class Fails(torch.nn.Module):
    """Cannot be called with other rows than the forward's."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] != ROWS:
            raise RuntimeError("not so many rows")
        return x


class Buffered(torch.nn.Module):
    """Puts its output into one buffer of its own, at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(ROWS, WIDTH)

    def forward(self, x: Any) -> Any:
        out = self.kept[: x.shape[0]]
        out.copy_(x)
        return out


class LogitsProcessor(torch.nn.Module):
    """The head as sglang has it: functions, not modules."""

    def forward(self, hidden: Any, weight: Any) -> Any:
        return self._get_logits(hidden, weight, None)

    def _get_logits(self, hidden_states: Any, lm_head: Any, _metadata: Any) -> Any:
        return self._compute_lm_head(hidden_states, lm_head, None)

    def _compute_lm_head(self, hidden_states: Any, lm_head: Any, _bias: Any, *, out: Any = None) -> Any:
        assert out is None
        scale = 1.0 if hidden_states.shape[0] < 8 else 1.5
        return hidden_states @ lm_head.weight.T * scale


class OldLogitsProcessor(LogitsProcessor):
    _compute_lm_head = None  # type: ignore[assignment]

    def _get_logits(self, hidden_states: Any, lm_head: Any, _metadata: Any) -> Any:
        return hidden_states @ lm_head.weight.T


OldLogitsProcessor.__name__ = "LogitsProcessor"


class WithHead(torch.nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor
        self.norm = Heads()
        self.lm_head = torch.nn.Linear(WIDTH, 5, bias=False)
        # Sums of whole numbers are exact in any order.
        torch.nn.init.ones_(self.lm_head.weight)

    def forward(self, batch: Any) -> Any:
        return self.processor(self.norm(batch.hidden), self.lm_head)


class ForwardBatch(SimpleNamespace):
    pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.invariant, self.by_rows, self.heads = Invariant(), ByRows(), Heads()
        self.counting, self.takes_batch, self.fails = Counting(), TakesBatch(), Fails()
        self.buffered = Buffered()

    def forward(self, batch: Any) -> Any:
        x = batch.hidden.clone()
        x, residual = self.invariant(x, batch.hidden.clone())
        x, _ = self.by_rows(Pair(x, 1.0))
        self.heads(x.reshape(ROWS * HEADS, WIDTH // HEADS))
        self.counting(x)
        self.takes_batch(x, batch)
        self.fails(x)
        return self.buffered(x) + residual


class Server:
    """The model's runner with replays, and a batch that carries."""

    def __init__(self, tmp_path: Path) -> None:
        self.control = tmp_path / "control"
        self.control.mkdir(mode=0o700)
        self.folder = tmp_path / "replays"
        self.folder.mkdir(mode=0o700)
        model = Model()
        self.runner = SimpleNamespace(model=model, forward=lambda batch: model.forward(batch))
        self.replays = Replays(self.runner, self.control, NONCE, 0)
        self.replays.wrap_forward()

    def ask(self, **fields: Any) -> dict[str, Any]:
        asked = {
            "folder": str(self.folder),
            "carrier": CARRIER,
            "modules": None,
            "first": 0,
            "count": 64,
            "rows": [1, 2, 8, 16, 64],
        }
        content = {"seq": 1, "nonce": NONCE, "replay": asked | fields}
        self.replays._answer(content)
        answer: dict[str, Any] = json.loads((self.control / "replay-ack-0.json").read_text())
        return answer

    def forward(self, rids: tuple[str, ...] = (CARRIER,)) -> Any:
        hidden = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
        batch = ForwardBatch(
            rids=list(rids),
            input_ids=torch.arange(ROWS),
            extend_seq_lens_cpu=[ROWS],
            extend_prefix_lens_cpu=[0],
            hidden=hidden,
        )
        return self.runner.forward(batch)

    def operators(self) -> dict[str, Any]:
        result = decode_result((self.folder / "replay-0.json").read_bytes())
        assert result.error is None
        return {operator.module: operator for operator in result.operators}


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_each_operator_is_judged_by_the_bits_of_its_rows(server: Server) -> None:
    assert server.ask()["ok"]
    server.forward()

    found = server.operators()
    assert {name: operator.status for name, operator in found.items()} == {
        "invariant": "invariant",
        "by_rows": "not_invariant",
        "heads": "invariant",
        "counting": "not_repeatable",
        "takes_batch": "stateful",
        "fails": "error",
        "buffered": "invariant",
    }
    by_rows = found["by_rows"]
    assert by_rows.tried == [1, 2, 8, 16, ROWS]
    assert by_rows.judged == [0, ROWS // 2, ROWS - 1]
    assert [argument.variants for argument in by_rows.arguments] == [[[0, 0, 0, 1, 1]] * 3]
    assert "ForwardBatch" in found["takes_batch"].reason
    assert "not so many rows" in found["fails"].reason


def test_the_rows_that_change_are_kept_as_bytes(server: Server) -> None:
    server.ask(modules=["by_rows"])
    server.forward()

    rows = read_rows(server.folder / "rows-0.safetensors")
    dtype, alone = rows["0/0/1/0"]
    _, many = rows["0/0/1/1"]
    row = (ROWS // 2 * WIDTH + torch.arange(WIDTH)).float() * 4
    assert dtype == "float32"
    assert alone.view("float32").tolist() == (row * 3.0).tolist()
    assert many.view("float32").tolist() == (row * 3.5).tolist()


def test_replays_change_nothing_for_the_server(tmp_path: Path, server: Server) -> None:
    class Untouched(Server):
        pass

    (tmp_path / "other").mkdir()
    expected = Untouched(tmp_path / "other").forward()
    server.ask(modules=["invariant", "by_rows", "heads", "fails", "buffered"])

    assert torch.equal(server.forward(), expected)
    assert not any(module._forward_hooks for module in server.runner.model.modules())


def test_only_the_carriers_forward_is_replayed_and_once(server: Server) -> None:
    server.ask()
    server.forward(("another request",))
    assert not (server.folder / "replay-0.json").exists()
    server.forward()
    (server.folder / "replay-0.json").unlink()
    server.forward()
    assert not (server.folder / "replay-0.json").exists()


def test_operators_are_taken_in_portions_in_execution_order(server: Server) -> None:
    server.ask(first=1, count=2)
    server.forward()

    result = decode_result((server.folder / "replay-0.json").read_bytes())
    assert [(operator.order, operator.module) for operator in result.operators] == [
        (1, "by_rows"),
        (2, "heads"),
    ]
    assert result.total == 7


def test_one_position_is_judged_with_more_rows_than_there_are(server: Server) -> None:
    server.ask(modules=["by_rows"], position=5, wrap=True, rows=[1, 64])
    server.forward()

    operator = server.operators()["by_rows"]
    assert operator.judged == [5]
    assert operator.tried == [1, ROWS, 64]
    assert operator.arguments[0].variants == [[0, 1, 1]]


def test_inputs_and_weights_are_kept_up_to_the_limit(server: Server) -> None:
    server.ask(modules=["by_rows"], keep_bytes=ROWS * WIDTH * 4 + 8 * WIDTH * 4)
    server.forward()

    from safetensors import safe_open

    with safe_open(server.folder / "kept-0.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["about"])["0"]
        assert file.get_tensor("0/input/pair.x").shape == (ROWS, WIDTH)
        assert file.get_tensor("0/weight/weight").shape == (WIDTH, WIDTH)
    assert about["attributes"]["eps"] == 0.5
    assert about["left_out"] == []


def test_a_weight_that_is_too_large_is_cut_to_the_elements_that_differ(server: Server) -> None:
    server.runner.model.by_rows.weight = torch.nn.Parameter(torch.ones(WIDTH, 1000))
    server.ask(modules=["by_rows"], keep_bytes=ROWS * WIDTH * 4 + 7 * 4000)
    server.forward()

    from safetensors import safe_open

    with safe_open(server.folder / "kept-0.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["about"])["0"]
        elements = file.get_tensor("0/elements").tolist()
        assert file.get_tensor("0/weight/weight").shape == (len(elements), 1000)
    # The first element of row 0 is 0 and so has the same bits.
    assert elements == list(range(1, WIDTH))
    assert about["cut"] == ["weight"]


def with_head(server: Server, processor: Any) -> Any:
    """The statuses of a model with that head."""
    model = WithHead(processor)
    server.runner.model = model
    server.replays._runner.model = model
    original = server.replays._runner
    original.forward = lambda batch: model.forward(batch)
    server.replays.wrap_forward()
    server.ask()
    with torch.no_grad():
        server.forward()
    assert "_get_logits" not in vars(processor)
    return {name: operator.status for name, operator in server.operators().items()}


def test_the_head_is_replayed_through_its_own_functions(server: Server) -> None:
    found = with_head(server, LogitsProcessor())
    assert found == {"norm": "invariant", "lm_head": "not_invariant", "logprob": "invariant"}
    assert server.operators()["lm_head"].arguments[0].variants == [[0, 0, 1, 1, 1]] * 3


def test_a_head_without_a_function_of_its_own_is_said_not_to_be_judged(server: Server) -> None:
    found = with_head(server, OldLogitsProcessor())
    assert found == {"norm": "invariant", "lm_head": "skipped", "logprob": "invariant"}


def test_a_folder_that_others_may_read_is_refused(server: Server) -> None:
    server.folder.chmod(0o755)
    answer = server.ask()
    assert not answer["ok"]
    assert "0700" in answer["error"]


def test_a_forward_that_calls_no_module_says_so(server: Server) -> None:
    server.runner.model.forward = lambda batch: batch.hidden
    server.ask()
    server.forward()
    result = json.loads((server.folder / "replay-0.json").read_text())
    assert "CUDA graph" in result["error"]


def test_the_watcher_takes_the_control_file(server: Server) -> None:
    import threading

    threading.Thread(target=server.replays.watch, daemon=True).start()
    asked = {"folder": str(server.folder), "carrier": CARRIER, "first": 0, "count": 1, "rows": [1]}
    write_json_atomically(server.control / CONTROL, {"seq": 7, "nonce": "other", "replay": asked})
    write_json_atomically(server.control / CONTROL, {"seq": 8, "nonce": NONCE, "replay": asked})
    deadline = time.monotonic() + 60
    while not (server.control / "replay-ack-0.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads((server.control / "replay-ack-0.json").read_text())["seq"] == 8
    server.forward()
    assert len(server.operators()) == 1


def test_the_chunk_that_holds_the_position_is_chosen() -> None:
    asked = Asked({"folder": "/f", "carrier": CARRIER, "first": 0, "count": 1, "rows": [1], "position": 140})
    batch = SimpleNamespace(
        rids=["other", CARRIER], extend_seq_lens_cpu=[10, 100], extend_prefix_lens_cpu=[0, 0]
    )
    assert judged_rows(asked, batch) is None
    batch.extend_prefix_lens_cpu = [0, 100]
    assert judged_rows(asked, batch) == [50]


def test_rows_are_found_where_they_are_and_nowhere_else() -> None:
    assert row_cuts.rows_in(torch.zeros(37, 4), 37) == (0, 1)
    assert row_cuts.rows_in(torch.zeros(74, 4), 37) == (0, 2)
    assert row_cuts.rows_in(torch.zeros(1, 37, 4), 37) == (1, 1)
    assert row_cuts.rows_in(torch.zeros(2, 37, 4), 37) == (1, 1)
    assert row_cuts.rows_in(torch.zeros(5, 4), 37) is None
    assert row_cuts.rows_in(torch.zeros(2, 37, 37), 37) is None
    assert row_cuts.rows_in(torch.zeros(()), 37) is None


def test_cut_rows_keep_their_heads_together() -> None:
    heads = torch.arange(6 * 3).reshape(6, 3)
    cut = row_cuts.taken({"q": heads}, 3, torch.tensor([2, 0]))["q"]
    assert cut.tolist() == torch.cat([heads[4:6], heads[0:2]]).tolist()


def test_what_a_call_stores_aside_is_left_out_when_it_is_made_again() -> None:
    """On CUDA the rotary embedding of some models stores K and V too."""

    @dataclass
    class FusedSetKVBufferArg:
        value: Any
        k_buffer: Any

    given = {"q": torch.zeros(3, 2), "fused_set_kv_buffer_arg": FusedSetKVBufferArg(torch.zeros(3), None)}
    assert row_cuts.stores_aside(given)
    assert not row_cuts.stores_aside({"q": given["q"]})
    assert row_cuts.copied(given, 3)["fused_set_kv_buffer_arg"] is None
    assert list(row_cuts.taken(given, 3, torch.tensor([1]))["q"].shape) == [1, 2]

    @dataclass
    class SomeKVCache:
        k_buffer: Any

    with pytest.raises(row_cuts.Stateful, match="a SomeKVCache"):
        row_cuts.copied({"q": torch.zeros(3, 2), "pool": SomeKVCache(None)}, 3)
