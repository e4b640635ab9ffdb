"""Digest capture on a small model of our own: what is hooked, named, mapped to rows, referenced and written.

The model calls its modules as sglang's do; the batch and the runner are the few fields that capture reads.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from klbench.core import digests as reference  # noqa: E402
from klbench.core.trace import Direction, Trace  # noqa: E402
from klbench.engine.traces import read_trace  # noqa: E402
from klbench.insitu import recording_writer  # noqa: E402
from klbench.insitu.composition import CompositionReader  # noqa: E402
from klbench.insitu.digest_capture import DigestCapture  # noqa: E402
from klbench.insitu.module_sites import Site, each_tensor, sites_of  # noqa: E402
from klbench.insitu.recording import NO_ROWS, row_axis  # noqa: E402

NONCE = "a1b2"
WIDTH = 16
GIB = 1 << 30


@dataclass
class Pair:
    left: Any
    right: Any


class Add(torch.nn.Module):
    """Adds in place: what came in is no more when it has run."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is not None:
            x.add_(residual)
        return x, residual


class Split(torch.nn.Module):
    def forward(self, x: Any, *parts: Any, scale: float = 1.0, **more: Any) -> Any:
        return {"halves": Pair(x[:, : WIDTH // 2], (x[:, WIDTH // 2 :], *parts)), "scale": scale, **more}


class Layer(torch.nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.add = Add()
        self.split = Split()
        self.shared = shared

    def forward(self, x: Any, _batch: Any) -> Any:
        y = self.proj(x)
        y, _ = self.add(y, residual=x)
        self.split(y, torch.arange(3.0))
        y = self.shared(y)
        heads = y.reshape(-1, WIDTH // 4)
        self.shared(heads)
        return y


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens = torch.nn.Embedding(50, WIDTH)
        shared = torch.nn.Tanh()
        self.layers = torch.nn.ModuleList([Layer(shared), Layer(shared)])

    def forward(self, batch: Any) -> Any:
        x = self.embed_tokens(batch.input_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return x


class Mode:
    name = "EXTEND"

    def __init__(self, decode: bool) -> None:
        self.name = "DECODE" if decode else "EXTEND"
        self._decode = decode

    def is_decode(self) -> bool:
        return self._decode

    def is_mixed(self) -> bool:
        return False


def extend(*requests: tuple[str, int, list[int]]) -> Any:
    """A batch of (id, prefix length, token ids)."""
    positions = [prefix + offset for _, prefix, tokens in requests for offset in range(len(tokens))]
    return SimpleNamespace(
        rids=[rid for rid, _, _ in requests],
        forward_mode=Mode(decode=False),
        input_ids=torch.tensor([token for _, _, tokens in requests for token in tokens]),
        positions=torch.tensor(positions),
        extend_seq_lens_cpu=[len(tokens) for _, _, tokens in requests],
        extend_prefix_lens_cpu=[prefix for _, prefix, _ in requests],
    )


def decode(*requests: tuple[str, int, int]) -> Any:
    """A batch of (id, position, token id)."""
    return SimpleNamespace(
        rids=[rid for rid, _, _ in requests],
        forward_mode=Mode(decode=True),
        input_ids=torch.tensor([token for _, _, token in requests]),
        positions=torch.tensor([position for _, position, _ in requests]),
        seq_lens=torch.tensor([position + 1 for _, position, _ in requests]),
        extend_seq_lens_cpu=None,
        extend_prefix_lens_cpu=None,
    )


ARMED, OTHER = f"klb-{NONCE}-1g+-4", f"klb-{NONCE}-1g-5"


class Bench:
    """A model under capture."""

    def __init__(self, folder: Path, monkeypatch: Any, *, trusted: bool = True, cap_bytes: int = GIB) -> None:
        monkeypatch.setenv("KLBENCH_CPU_ENGINE", "1" if trusted else "0")
        self.folder = folder
        self.troubles: list[BaseException] = []
        self.model = Model()
        self.reader = CompositionReader(NONCE)
        runner = SimpleNamespace(model=self.model)
        about = {path: {"class": "", "state": None, "window": None} for path, _ in self.model.named_modules()}
        self.capture = DigestCapture(runner, folder, 0, NONCE, 0, cap_bytes, about, self.troubles.append)

    def forward(self, batch: Any) -> Any:
        composition = self.reader.read(batch)
        armed = composition is not None and composition.armed
        if armed:
            assert self.capture.begin(composition, batch)
        with torch.no_grad():
            result = self.model(batch)
        if armed:
            self.capture.end()
        return result

    def close(self) -> Trace:
        self.capture.close(None)
        self.capture.remove()
        return read_trace(self.folder)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def digests_of(trace: Trace, module: str, direction: Direction, argument: str, call: int = 0) -> Any:
    """{(request, position): digest} of one argument of one call site; a whole tensor is under None."""
    number = next(i for i, o in enumerate(trace.operators) if (o.module, o.call) == (module, call))
    tensors = np.flatnonzero(
        (trace.tensor_operator == number)
        & (trace.tensor_direction == direction)
        & (trace.tensor_argument == trace.arguments.index(argument))
    )
    found = {}
    for tensor in tensors:
        start = trace.tensor_start[tensor]
        for place in range(start, start + trace.tensor_rows[tensor]):
            row = int(trace.tensor_row[place])
            key = None if row < 0 else (int(trace.row_request[row]), int(trace.row_position[row]))
            found[key] = tuple(trace.digest[place].tolist())
    return found


def digest(row: Any) -> tuple[int, int]:
    data = row.contiguous().view(torch.uint8).numpy().reshape(1, -1)
    return tuple(reference.digest_rows(data)[0].tolist())


def names_of(trace: Trace, module: str) -> set[tuple[str, str]]:
    numbers = [i for i, o in enumerate(trace.operators) if o.module == module]
    mine = np.isin(trace.tensor_operator, numbers)
    pairs = zip(trace.tensor_direction[mine], trace.tensor_argument[mine], strict=True)
    return {("out" if direction else "in", trace.arguments[argument]) for direction, argument in pairs}


def test_a_row_has_the_digest_of_its_bits_whatever_shares_its_forward(bench: Bench) -> None:
    tokens = [7, 3, 9, 4]
    result = bench.forward(extend((OTHER, 0, [1, 2, 3]), (ARMED, 0, tokens), (OTHER + "1", 0, [5])))

    trace = bench.close()

    rows = digests_of(trace, "layers.1", Direction.OUT, "0")
    assert rows == {(4, position): digest(result[3 + position]) for position in range(4)}
    assert bench.troubles == []
    assert trace.row_in_batch.tolist() == [3, 4, 5, 6]
    assert trace.row_token.tolist() == tokens
    assert trace.forward_rows.tolist() == [8]


def test_decode_and_prefill_give_the_same_names_and_the_same_digests_for_the_same_bits(bench: Bench) -> None:
    scoring = ARMED.replace("1g", "1s")
    bench.forward(extend((ARMED, 0, [7, 3])))
    bench.forward(decode((ARMED, 2, 9)))
    bench.forward(extend((scoring, 0, [7, 3, 9])))

    trace = bench.close()

    assert trace.row_arm.tolist() == [1, 1, 1, 2, 2, 2]
    decoded, scored = (
        {(int(t), int(d), int(a)) for t, d, a in zip(*columns, strict=True)}
        for columns in (
            [
                c[trace.tensor_forward == forward]
                for c in (trace.tensor_operator, trace.tensor_direction, trace.tensor_argument)
            ]
            for forward in (1, 2)
        )
    )
    assert decoded == scored
    tokens = digests_of(trace, "embed_tokens", Direction.OUT, "0")
    assert len(tokens) == 3
    for position, token in enumerate((7, 3, 9)):
        assert tokens[4, position] == digest(bench.model.embed_tokens.weight[token].detach())


def test_what_a_module_changes_in_place_is_seen_as_it_was_and_as_it_became(bench: Bench) -> None:
    batch = extend((ARMED, 0, [7, 3]))
    bench.forward(batch)

    trace = bench.close()

    with torch.no_grad():
        x = bench.model.embed_tokens(batch.input_ids)
        y = bench.model.layers[0].proj(x)
    assert digests_of(trace, "layers.0.proj", Direction.OUT, "0")[4, 1] == digest(y[1])
    assert digests_of(trace, "layers.0.add", Direction.IN, "x")[4, 1] == digest(y[1])
    assert digests_of(trace, "layers.0.add", Direction.IN, "residual")[4, 1] == digest(x[1])
    assert digests_of(trace, "layers.0.add", Direction.OUT, "0")[4, 1] == digest(y[1] + x[1])


def test_nested_arguments_have_names_that_do_not_depend_on_how_they_were_passed(bench: Bench) -> None:
    bench.forward(extend((ARMED, 0, [7, 3])))

    trace = bench.close()

    assert names_of(trace, "layers.0.split") == {
        ("in", "x"),
        ("in", "parts.0"),
        ("out", "halves.left"),
        ("out", "halves.right.0"),
        ("out", "halves.right.1"),
    }
    # Three numbers for two rows: no rows.
    assert digests_of(trace, "layers.0.split", Direction.IN, "parts.0") == {None: digest(torch.arange(3.0))}


def test_a_shared_module_is_named_by_the_layer_that_calls_it_and_counts_its_calls(bench: Bench) -> None:
    batch = extend((ARMED, 0, [7, 3]))
    result = bench.forward(batch)

    trace = bench.close()

    sites = [(o.module, o.call) for o in trace.operators if o.module.endswith("shared")]
    assert sites == [(f"layers.{layer}.shared", call) for layer in (0, 1) for call in (0, 1)]
    # Four heads a row are folded into the row.
    folded = digests_of(trace, "layers.1.shared", Direction.IN, "input", call=1)
    assert folded == {(4, position): digest(result[position]) for position in (0, 1)}


def test_forwards_without_an_armed_request_leave_no_trace_and_hooks_go_in_the_end(bench: Bench) -> None:
    bench.forward(extend((OTHER, 0, [1, 2])))
    assert not any(m._forward_hooks for m in bench.model.modules())
    bench.forward(extend((ARMED, 0, [1, 2])))
    assert any(m._forward_hooks for m in bench.model.modules())
    bench.forward(decode((OTHER, 2, 4)))

    trace = bench.close()

    assert trace.forward_number.tolist() == [2]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bench.model.modules())


def test_digests_are_the_same_where_versions_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = []
    for trusted in (True, False):
        folder = tmp_path / str(trusted)
        folder.mkdir()
        bench = Bench(folder, monkeypatch, trusted=trusted)
        bench.forward(extend((ARMED, 0, [7, 3, 5])))
        traces.append(bench.close())
    ours, theirs = traces

    assert np.array_equal(ours.digest, theirs.digest)
    assert np.array_equal(ours.tensor_row, theirs.tensor_row)


def test_passing_a_tensor_on_costs_no_further_digest(bench: Bench) -> None:
    bench.forward(extend((ARMED, 0, list(range(40)))))
    trace = bench.close()

    from safetensors import safe_open

    with safe_open(bench.folder / "rank0-000001.safetensors", framework="numpy") as file:
        stored = file.get_slice("packed_digest").get_shape()[0]
    assert stored < 0.6 * len(trace.digest)


def test_nothing_is_written_while_a_forward_runs_however_long_it_takes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread would share the interpreter with the forward, and slow it down."""
    writer = bench.capture._writer
    now = [time.monotonic()]
    monkeypatch.setattr(recording_writer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bench.forward(extend((ARMED, 0, [5, 6, 7])))
    assert not writer._may_work()
    now[0] += 10.0
    assert writer._may_work()
    batch = decode((ARMED, 3, 8))
    composition = bench.reader.read(batch)
    assert bench.capture.begin(composition, batch)
    now[0] += 10.0
    assert not writer._may_work()
    with torch.no_grad():
        bench.model(batch)
    bench.capture.end()
    now[0] += 10.0
    assert writer._may_work()
    bench.close()


def test_a_hook_that_fails_breaks_the_capture_and_not_the_forward(bench: Bench) -> None:
    bench.capture._operator = lambda *_: (_ for _ in ()).throw(ValueError("no"))  # type: ignore[method-assign]

    result = bench.forward(extend((ARMED, 0, [7, 3])))

    assert result.shape == (2, WIDTH)
    assert [str(trouble) for trouble in bench.troubles] == ["no"]


def test_a_full_disk_makes_the_trace_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch)
    monkeypatch.setattr(
        "klbench.insitu.recording_writer.shutil.disk_usage", lambda _: SimpleNamespace(free=-1)
    )
    bench.forward(extend((ARMED, 0, [7, 3])))

    trace = bench.close()

    assert trace.invalid is not None
    assert "floor" in trace.invalid
    assert len(bench.troubles) == 1


def test_rows_that_are_not_where_the_batch_says_make_the_trace_invalid(bench: Bench) -> None:
    batch = extend((ARMED, 0, [7, 3]))
    batch.positions += 1
    bench.forward(batch)

    trace = bench.close()

    assert trace.invalid is not None
    assert "elsewhere" in trace.invalid


def test_what_may_hide_a_tensor_is_listed_as_not_observed() -> None:
    class Handle:
        pass

    found: list[str] = []
    unknown: list[str] = []
    each_tensor("x", [1, None, "a", {"b": Handle()}], lambda name, _: found.append(name), unknown.append)

    assert (found, unknown) == ([], ["x.3.b: Handle"])


def test_where_a_fused_kernel_writes_in_the_pool_is_no_input_of_its_module() -> None:
    """On CUDA the rotary embedding stores K and V too: the slots, and the pool, differ between the arms."""

    @dataclass
    class FusedSetKVBufferArg:
        value: Any
        k_buffer: Any

    found: list[str] = []
    given = FusedSetKVBufferArg(torch.zeros(2), torch.zeros(8))
    each_tensor("fused_set_kv_buffer_arg", given, lambda name, _: found.append(name), found.append)

    assert found == []


@pytest.mark.parametrize(
    ("shape", "rows", "known", "expected"),
    [
        ((6, 16), 6, None, 0),
        ((24, 4), 6, None, 0),
        ((1, 6, 4, 16), 6, None, 1),
        ((1, 4, 6, 16), 6, None, 2),
        ((1, 4, 4, 16), 4, None, None),
        ((1, 4, 4, 16), 4, 2, 2),
        ((1, 12, 4), 6, None, None),
        ((1, 4, 6, 16), 6, 1, 2),
        ((0, 6), 6, None, None),
        ((), 1, None, None),
        ((1, 4, 16), 1, 2, 0),
        ((3, 3), 3, None, 0),
        ((3, 3), 3, 1, 1),
        ((64,), 32, NO_ROWS, None),
    ],
)
def test_rows_are_found_in_the_first_dimension_or_in_the_only_one_of_their_number(
    shape: tuple[int, ...], rows: int, known: int | None, expected: int | None
) -> None:
    """Linear attention puts out [1, rows, heads, size], Gemma's norms of heads [1, heads, rows, size]."""
    assert row_axis(shape, rows, known) == expected


def test_a_module_without_a_readable_signature_numbers_its_arguments() -> None:
    site = Site(SimpleNamespace(forward=min), ["m"])  # type: ignore[arg-type]

    assert site.argument(0) == "args.0"


def test_every_path_of_a_shared_module_is_known() -> None:
    paths = {tuple(site.paths) for site in sites_of(Model())}

    assert ("layers.0.shared", "layers.1.shared") in paths


def test_the_file_of_a_finished_trace_says_what_it_observed(bench: Bench) -> None:
    bench.forward(extend((ARMED, 0, [7, 3])))
    bench.close()

    about = json.loads((bench.folder / "rank0.json").read_text())

    assert about["backend"] == "digest"
    assert about["observes_head"] is False
    assert about["not_observed"] == ["sampler: not a module of this version"]


class HeadsFirst(torch.nn.Module):
    """As Gemma 3's norm of heads sees its queries: [1, heads, rows, size]."""

    def forward(self, x: Any) -> Any:
        return x * 2


def test_rows_behind_heads_have_the_same_digests_in_batches_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows of four heads alone could be either: the forward before has told."""
    bench = Bench(tmp_path, monkeypatch, trusted=False)
    norm = HeadsFirst()
    bench.model.layers[0].shared = bench.model.layers[1].shared = Turned(norm)
    others = tuple((f"klb-{NONCE}-1g-{place}", 0, [9]) for place in range(3))
    bench.forward(extend((ARMED, 0, [7, 3, 5]), *others))
    bench.forward(decode((ARMED, 3, 5), *((rid, 1, 2) for rid, _, _ in others)))
    trace = bench.close()

    assert bench.troubles == []
    found = digests_of(trace, "layers.0.shared.norm", Direction.IN, "x")
    assert sorted(position for _, position in found) == [0, 1, 2, 3]
    # Position 2 and position 3 have the same token, and this model looks at nothing else.
    assert found[4, 2] == found[4, 3]


class Turned(torch.nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, y: Any) -> Any:
        if y.shape[1] != WIDTH:
            return y
        heads = y.unflatten(-1, (4, WIDTH // 4)).transpose(0, 1).unsqueeze(0)
        return self.norm(heads).squeeze(0).transpose(0, 1).flatten(-2)
