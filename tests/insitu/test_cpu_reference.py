"""The CPU engine's products: what torch defines, rounded once, and blind to how many rows share a call."""

import json
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from klbench.insitu import cpu_engine  # noqa: E402
from klbench.insitu.faults_seams import RequestHistory  # noqa: E402


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive"])
def test_attention_is_what_torch_defines(heads: int, mask: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, 9, 16, dtype=torch.float64) for n in (heads, 2, 2))
    allowed = torch.ones(9, 9, dtype=torch.bool).tril() & torch.ones(9, 9, dtype=torch.bool).triu(-3)
    additive = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    attn_mask = {"boolean": allowed, "additive": additive}.get(mask)
    options = {"is_causal": mask == "causal", "scale": 0.3, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    torch.testing.assert_close(cpu_engine.exact_attention(query, key, value, attn_mask, **options), expected)


def test_products_keep_the_type_and_round_once() -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(5, 700).bfloat16(), torch.randn(700, 3).bfloat16(), torch.randn(3).bfloat16()
    assert torch.equal(cpu_engine.exact_mm(a, b), (a.double() @ b.double()).bfloat16())
    assert torch.equal(cpu_engine.exact_bmm(a[None], b[None])[0], cpu_engine.exact_mm(a, b))
    assert torch.equal(
        cpu_engine.exact_addmm(bias, a, b), (bias.double() + a.double() @ b.double()).bfloat16()
    )
    whole = torch.arange(6).view(2, 3)
    assert cpu_engine.exact_mm(whole, whole.T).tolist() == [[5, 14], [14, 50]]


def test_registered_products_do_not_see_their_neighbours() -> None:
    program = textwrap.dedent("""
        import json, torch, torch.nn.functional as F
        torch.set_num_threads(1)
        from klbench.insitu import cpu_engine
        library = torch.library.Library("aten", "IMPL")
        torch.manual_seed(0)
        x, w, bias = (torch.randn(*shape).bfloat16() for shape in ((300, 515), (64, 515), (64,)))
        q, k = torch.randn(1, 4, 200, 32).bfloat16(), torch.randn(1, 2, 200, 32).bfloat16()

        def row_by_row_equal():
            attention = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
            return [
                all(torch.equal(F.linear(x, w)[i:i+1], F.linear(x[i:i+1], w)) for i in range(300)),
                all(torch.equal(F.linear(x, w, bias)[:m], F.linear(x[:m], w, bias)) for m in range(1, 300)),
                all(torch.equal(attention[:, :, n-1:n], F.scaled_dot_product_attention(
                    q[:, :, n-1:n], k[:, :, :n], k[:, :, :n], enable_gqa=True)) for n in range(1, 201)),
            ]

        cpu_engine.register_exact_products(library)
        with torch.inference_mode():
            print(json.dumps(row_by_row_equal()))
    """)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, True]


def test_a_second_chunk_is_no_restore() -> None:
    history = RequestHistory()
    assert history.extend("a", 0, 128)
    assert not history.extend("a", 128, 128)
    assert not history.extend("a", 256, 40)
    assert [history.decode("a", 297), history.decode("a", 298)] == [1, 2]
    assert not history.extend("a", 298, 1), "a decode row in a mixed chunk"


def test_an_id_that_is_used_again_begins_anew() -> None:
    history = RequestHistory()
    history.extend("a", 0, 100)
    assert history.extend("a", 99, 1), "the same prompt, restored"
    history.decode("a", 101)
    history.decode("a", 102)
    assert history.extend("a", 102, 2), "a second turn on the first one's cache"
    assert history.decode("a", 105) == 1
