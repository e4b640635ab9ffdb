"""Where faults are put: wraps that leave no trace, the parts of a forward, the smallest change of a float."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu.faults_attention import _product  # noqa: E402
from klbench.insitu.faults_seams import Moments, RequestHistory, Wraps, module_at, nudged  # noqa: E402


class Doubling(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


def test_a_wrap_changes_one_object_and_undo_puts_back_exactly_what_was_there() -> None:
    module, other = Doubling(), Doubling()
    before = dict(vars(module))
    wraps = Wraps()
    wraps.around(module, "forward", lambda original, x: original(x) + 1)
    wraps.around(module, "forward", lambda original, x: original(x) * 10)
    assert module(torch.tensor(3)).item() == 70
    assert other(torch.tensor(3)).item() == 6

    wraps.undo()

    assert module(torch.tensor(3)).item() == 6
    assert vars(module) == before


def test_a_wrap_of_an_attribute_of_the_object_itself_gives_it_back() -> None:
    owner = SimpleNamespace(answer=lambda: 1)
    own = owner.answer
    wraps = Wraps()
    wraps.around(owner, "answer", lambda original: original() + 1)
    assert owner.answer() == 2
    wraps.undo()
    assert owner.answer is own


def test_a_wrapped_method_of_a_class_gets_the_instance_and_goes() -> None:
    own = Doubling.forward
    wraps = Wraps()
    wraps.around_method(Doubling, "forward", lambda original, x: original(x) + 5)
    assert Doubling()(torch.tensor(1)).item() == 7
    wraps.undo()
    assert Doubling.forward is own


def test_a_changed_input_is_what_later_hooks_see_and_the_giver_keeps_its_own() -> None:
    module, seen = Doubling(), []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].item()), with_kwargs=True
    )
    wraps = Wraps()
    wraps.before_call(module, lambda x: x + 1)
    given = torch.tensor(3)
    assert module(given).item() == 8
    assert (seen, given.item()) == ([4], 3)
    assert module(x=given).item() == 8
    assert seen == [4, 4]
    wraps.undo()
    assert module(given).item() == 6


def test_a_wrap_that_somebody_wrapped_since_is_said_and_the_others_still_go() -> None:
    first, second = Doubling(), Doubling()
    wraps = Wraps()
    wraps.around(first, "forward", lambda original, x: original(x) + 1)
    wraps.around(second, "forward", lambda original, x: original(x) + 1)
    second.forward = lambda x: x
    with pytest.raises(RuntimeError, match="wrapped by somebody else"):
        wraps.undo()
    assert first(torch.tensor(3)).item() == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_nudge_moves_the_largest_element_of_each_row_by_its_ulps(dtype: Any) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    rows = torch.tensor([[0.5, -3.0, 1.0], [2.0, 0.0, -1.0]], dtype=dtype)
    moved = nudged(rows, 3)
    assert (moved.view(bits) - rows.view(bits)).tolist() == [[0, 3, 0], [3, 0, 0]]
    assert moved[0, 1] < -3.0
    assert rows[0, 1] == -3.0


def _batch(kind: str, **fields: Any) -> Any:
    mode = SimpleNamespace(is_decode=lambda: kind == "decode", is_extend=lambda: kind == "extend")
    return SimpleNamespace(forward_mode=mode, **fields)


def _extend(rids: list[str], prefixes: list[int], lengths: list[int]) -> Any:
    return _batch(
        "extend",
        rids=rids,
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens_cpu=lengths,
        input_ids=torch.zeros(sum(lengths)),
    )


def _decode(rids: list[str], seq_lens: list[int]) -> Any:
    return _batch("decode", rids=rids, seq_lens=torch.tensor(seq_lens), input_ids=torch.zeros(len(rids)))


def test_moments_tell_restored_prefixes_from_second_chunks_and_count_decode_steps() -> None:
    moments = Moments()
    moments.begin(_extend(["cold", "hit"], [0, 30], [64, 2]))
    cold, hit = moments.now.parts
    assert (cold.row, cold.rows, cold.restored, cold.step) == (0, 64, False, 0)
    assert (hit.row, hit.prefix_len, hit.seq_len, hit.restored) == (64, 30, 32, True)
    assert moments.now.rows == 66

    moments.begin(_extend(["cold"], [64], [20]))
    assert [part.restored for part in moments.now.parts] == [False]

    for step in (1, 2):
        moments.begin(_decode(["hit", "cold"], [32 + step, 84 + step]))
        assert [(part.step, part.row, part.prefix_len) for part in moments.now.parts] == [
            (step, 0, 31 + step),
            (step, 1, 83 + step),
        ]
    assert moments.now.number == 4


def test_an_id_that_begins_anew_has_a_first_forward_again() -> None:
    history = RequestHistory()
    assert history.extend("a", 0, 10)
    assert history.decode("a", 11) == 1
    assert history.extend("a", 8, 3)
    assert history.decode("a", 12) == 1


def test_a_module_that_layers_share_is_found_in_each() -> None:
    layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    shared = Doubling()
    for layer in layers:
        layer.rotary = shared
    model = torch.nn.Module()
    model.layers = layers
    assert module_at(model, 1, "absent", "rotary") is shared
    with pytest.raises(ValueError, match=r"no layers\.2\.rotary"):
        module_at(model, 2, "rotary")


def test_products_of_heads_are_those_of_float64_without_the_operators_that_sglang_replaces() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(2, 3, 5, 7).double(), torch.randn(2, 7, 11).double()
    called: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    with Watch():
        product = _product(a, b)

    assert torch.allclose(product, torch.einsum("hgrk,hkn->hgrn", a, b), rtol=1e-14, atol=1e-14)
    assert not {"aten::bmm", "aten::mm", "aten::addmm"} & set(called)
