"""Operators with state that are called past their hooks, as sglang calls mixers: seen, or named as missed."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.core.trace import Direction, Slot, Trace  # noqa: E402
from klbench.engine.traces import read_trace  # noqa: E402
from klbench.insitu import direct_calls, state_reads  # noqa: E402
from klbench.insitu.capture import describe_modules  # noqa: E402
from klbench.insitu.composition import CompositionReader  # noqa: E402
from klbench.insitu.digest_capture import DigestCapture  # noqa: E402
from klbench.insitu.direct_calls import (  # noqa: E402
    DirectCall,
    is_called_directly,
    layer_numbers,
    never_called,
)
from klbench.insitu.module_sites import sites_of  # noqa: E402
from klbench.insitu.state_probe import StateProbe  # noqa: E402
from klbench.insitu.state_reads import Pools  # noqa: E402
from tests.insitu.test_digest_capture import (  # noqa: E402
    ARMED,
    GIB,
    NONCE,
    OTHER,
    WIDTH,
    decode,
    digest,
    digests_of,
    extend,
    names_of,
)

SLOTS, LAYERS = 6, (3, 5)


@dataclass
class Mamba2Metadata:
    slots: list[int]


class MambaPool:
    @dataclass
    class State:
        conv: list[Any]
        temporal: Any


class Slots:
    """A request pool in which request r has the recurrent slot r + 1 in each of the mixers' layers."""

    def __init__(self) -> None:
        self.layers = {
            layer: MambaPool.State([torch.zeros(SLOTS, WIDTH)], torch.zeros(SLOTS, WIDTH)) for layer in LAYERS
        }

    def get_mamba_indices(self, requests: Any) -> Any:
        return requests + 1

    def mamba2_layer_cache(self, layer: int) -> Any:
        return self.layers[layer]


class MambaMixer2(torch.nn.Module):
    """Sums what it is given onto its state, row by row; its arguments are those of sglang's."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = torch.nn.Tanh()
        self.calls = 0

    def forward(
        self,
        *,
        hidden_states: Any,
        output: Any = None,
        layer_cache: Any,
        metadata: Any,
        mup_vector: Any = None,  # noqa: ARG002 - as a real one
    ) -> Any:
        self.calls += 1
        x, out = self.in_proj(hidden_states), torch.empty_like(hidden_states)
        for row, slot in enumerate(metadata.slots):
            layer_cache.temporal[slot] += x[row]
            layer_cache.conv[0][slot] = x[row]
            out[row] = layer_cache.temporal[slot]
        result = self.norm(out)
        if output is not None:
            output.copy_(result)
        return result, torch.ones(3, WIDTH), None


class Layer(torch.nn.Module):
    """`how` it reaches its mixer: by its forward with or without a buffer, as a module, or by its parts."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.layer_id = number
        self.before = torch.nn.Tanh()
        self.mixer = MambaMixer2()
        self.how = how

    def forward(self, x: Any, cache: Any, metadata: Any) -> Any:
        x = self.before(x)
        given = {
            "hidden_states": x,
            "layer_cache": cache,
            "metadata": metadata,
            "mup_vector": torch.ones(1, WIDTH),
        }
        if self.how == "into a buffer":
            # Nobody has written there yet.
            buffer = torch.full_like(x, float("nan"))
            self.mixer.forward(output=buffer, **given)
            return buffer
        if self.how == "by its parts":
            return self.mixer.norm(self.mixer.in_proj(x))
        call = self.mixer if self.how == "as a module" else self.mixer.forward
        return call(**given)[0]


class Model(torch.nn.Module):
    def __init__(self, how: str, *, numbered: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed_tokens = torch.nn.Embedding(50, WIDTH)
        self.layers = torch.nn.ModuleList([Layer(number, how) for number in LAYERS])
        if not numbered:
            for layer in self.layers:
                del layer.layer_id

    def forward(self, batch: Any, pool: Slots) -> Any:
        x = self.embed_tokens(batch.input_ids)
        counts = batch.extend_seq_lens_cpu or [1] * len(batch.rids)
        slots = [request + 1 for request, count in enumerate(counts) for _ in range(count)]
        for number, layer in zip(LAYERS, self.layers, strict=True):
            x = layer(x, pool.layers[number], Mamba2Metadata(slots))
        return x


class Server:
    """A model of mixers under capture by one of the two back ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, **options: Any) -> None:
        self.folder = folder
        self.pool = Slots()
        self.model = Model(how, numbered=options.pop("numbered", True))
        self.reader = CompositionReader(NONCE)
        self.troubles: list[BaseException] = []
        monkeypatch.setattr(state_reads, "_pools_of_forward", lambda: Pools(self.pool, None))
        runner = SimpleNamespace(model=self.model, req_to_token_pool=self.pool, token_to_kv_pool=None)
        back_end = options.pop("back_end", DigestCapture)
        about = describe_modules(self.model)
        self.capture = back_end(runner, folder, 0, NONCE, 0, GIB, about, self.troubles.append)

    def forward(self, batch: Any) -> Any:
        batch.req_pool_indices = torch.arange(len(batch.rids))
        composition = self.reader.read(batch)
        assert composition is not None
        assert self.capture.begin(composition, batch)
        with torch.no_grad():
            result = self.model(batch, self.pool)
        self.capture.end()
        return result

    def close(self) -> Trace:
        self.capture.close(None)
        self.capture.remove()
        return read_trace(self.folder)

    @property
    def not_observed(self) -> list[str]:
        return list(json.loads((self.folder / "rank0.json").read_text())["not_observed"])


HOW = ["into a buffer", "by its forward", "as a module"]


@pytest.mark.parametrize("how", HOW)
def test_a_mixer_is_seen_with_its_state_however_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    server = Server(tmp_path, monkeypatch, how)
    result = server.forward(extend((OTHER, 0, [9]), (ARMED, 0, [7, 3])))
    states = {layer: cache.temporal[2].clone() for layer, cache in server.pool.layers.items()}
    step = server.forward(decode((OTHER, 1, 4), (ARMED, 2, 9)))
    trace = server.close()

    assert server.troubles == []
    assert [layer.mixer.calls for layer in server.model.layers] == [2, 2]
    assert trace.observes_state
    mixer = "layers.1.mixer"
    assert digests_of(trace, mixer, Direction.OUT, "0") == {
        **{(4, position): digest(result[1 + position]) for position in (0, 1)},
        (4, 2): digest(step[1]),
    }
    # Neither the pool, nor a buffer that holds nothing yet, nor a constant of the model enters it.
    assert names_of(trace, mixer) == {("in", "hidden_states"), ("out", "0")}
    about = next(operator for operator in trace.operators if operator.module == mixer)
    assert (about.state, about.container) == ("ssm", True)
    left = {
        (
            int(trace.slot_position[place]),
            trace.operators[trace.slot_operator[place]].module,
        ): trace.slot_digest[place]
        for place in range(len(trace.slot_kind))
        if trace.slot_kind[place] == Slot.WRITTEN
        and trace.arguments[trace.slot_argument[place]] == "temporal"
    }
    for number, layer in enumerate(LAYERS):
        assert tuple(left[1, f"layers.{number}.mixer"].tolist()) == digest(states[layer])


def test_what_is_never_called_as_a_module_is_named_and_stands_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch, "by its parts")
    server.forward(extend((ARMED, 0, [7, 3])))
    trace = server.close()

    mixers = {operator.module: operator for operator in trace.operators if operator.state is not None}
    assert set(mixers) == {"layers.0.mixer", "layers.1.mixer"}
    assert not any(names_of(trace, mixer) for mixer in mixers)
    named = [what for what in server.not_observed if what.startswith("layers.")]
    assert named == [
        f"layers.{n}.mixer: it was not called as a module, nor was its state seen" for n in (0, 1)
    ]


def test_a_mixer_without_a_layer_number_hides_its_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch, "by its forward", numbered=False)
    server.forward(extend((ARMED, 0, [7, 3])))
    trace = server.close()

    assert (trace.invalid, server.troubles, trace.observes_state) == (None, [], False)
    assert len(digests_of(trace, "layers.1.mixer", Direction.OUT, "0")) == 2
    assert any("layer number" in what for what in server.not_observed)


@pytest.mark.parametrize("numbered", [True, False])
def test_the_probe_takes_a_mixers_layer_from_around_it_and_passes_over_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbered: bool
) -> None:
    if not numbered:
        monkeypatch.setattr(Attending, "numbers", ())
    model = Attending()
    server = Server(tmp_path, monkeypatch, "as a module")
    about = describe_modules(model)
    runner = SimpleNamespace(model=model, req_to_token_pool=server.pool, token_to_kv_pool=None)
    probe = StateProbe(runner, tmp_path, 0, NONCE, 0, GIB, about, server.troubles.append)
    names = sorted((place.path, place.layer) for place in probe._stateful)
    probe.close(None)

    assert names == (
        [("attn", 0), ("layers.0.mixer", 3), ("layers.1.mixer", 5)] if numbered else [("attn", 0)]
    )
    missed = [what for what in server.not_observed if "layer number" in what]
    assert [what.split()[0] for what in missed] == ([] if numbered else ["layers.0.mixer", "layers.1.mixer"])
    server.capture.close(None)


def test_the_probe_looks_at_the_slots_of_a_mixer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, monkeypatch, "by its forward", back_end=StateProbe)
    server.forward(extend((ARMED, 0, [7, 3])))
    server.forward(decode((ARMED, 2, 9)))
    trace = server.close()

    assert (trace.invalid, server.troubles) == (None, [])
    looked = {trace.operators[number].module for number in trace.slot_operator.tolist()}
    assert looked == {"layers.0.mixer", "layers.1.mixer"}


class RadixAttention(torch.nn.Module):
    layer_id = 0
    sliding_window_size = -1


class Attending(Model):
    numbers: tuple[int, ...] = LAYERS

    def __init__(self) -> None:
        super().__init__("as a module", numbered=bool(self.numbers))
        self.attn = RadixAttention()


@pytest.mark.parametrize("own", [False, True])
def test_a_forward_is_as_it_was_when_the_hooks_are_gone(own: bool) -> None:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    plain = layer.forward
    if own:
        layer.forward = plain
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    direct = DirectCall(layer)
    x = torch.randn(2, WIDTH)
    for call in (layer.forward, layer, layer.forward):
        assert torch.equal(call(x), plain(x))
    assert len(seen) == 3, "once a call, however it is made"

    direct.remove()

    layer.forward(x)
    assert len(seen) == 3
    assert ("forward" in vars(layer)) is own
    assert layer.forward == plain


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("out = self.attn.forward(q, k, v, batch)", True),
        ("out = self.self_attn.forward(q)", True),
        # A fault may have wrapped its `forward`: what the hooks see anyway is left alone.
        ("out = self.attn(q, k, v, batch)\nx = self.proj.forward(out)", False),
        ("", False),
    ],
)
def test_only_what_is_called_past_its_hooks_is_wrapped(source, expected, monkeypatch):
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.attn = torch.nn.Linear(2, 2)
    (site,) = [one for one in sites_of(model) if one.paths == ["layer.attn"]]
    monkeypatch.setattr(direct_calls, "_source_of", lambda _kind: source)
    assert is_called_directly(model, site) is expected


def described(**states: str | None) -> dict[str, Any]:
    return {path.replace("_", "."): {"state": state} for path, state in states.items()}


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        # Beside it or in it.
        (["l.0.proj"], ["l.0.attn"]),
        (["l.0.attn.inner"], ["l.0.attn"]),
        # The layer did not run, or it was called.
        (["l.1.proj"], []),
        (["l.0.attn", "l.0.proj"], []),
        # Models with one attention for prefill and another for decode.
        (["l.0.proj", "l.0.mha"], []),
        # Another kind of state beside it says nothing.
        (["l.0.proj", "l.0.scan"], ["l.0.attn"]),
    ],
)
def test_what_ran_past_us_is_known_by_its_neighbours(called: list[str], expected: list[str]) -> None:
    about = described(
        l_0=None, l_0_proj=None, l_0_attn="kv", l_0_attn_inner=None, l_0_mha=None, l_0_scan="ssm"
    )
    if "l.0.mha" in called:
        about["l.0.mha"]["state"] = "kv"
    found = [path for path in never_called(about, called) if path != "l.0.scan"]

    assert found == expected


def test_a_module_that_reads_its_state_through_one_inside_is_not_missed() -> None:
    assert (
        never_called(described(l_0_mixer="ssm", l_0_mixer_scan="ssm"), ["l.0.proj", "l.0.mixer.scan"]) == []
    )


def test_the_layer_of_a_module_is_its_own_or_that_around_it() -> None:
    numbers = layer_numbers(Model("as a module"))

    assert (numbers["layers.1.mixer.in_proj"], numbers["layers.0.mixer"], numbers["layers"]) == (5, 3, None)
