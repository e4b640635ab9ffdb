"""FlashAttention-3 alone, without a server: do a row's bits depend on what shares its call, and on a window?

    $ python3 -m tests.gpu.window_kernel          # on a Hopper GPU, with sgl_kernel importable
    window  call                       rows  differ
    none    extend of 888              888   0
    none    chunk from row 500         388   0
    none    decode, one row a call     272   0
    255     extend of 888              888   0
    255     chunk from row 512         376   0
    255     chunk from row 500         388   388
    255     decode, one row a call     272   245

That was read on an H200 with sglang 0.5.17. With a sliding window a row's bits depend on where in its tile of
query rows it stands; without one they do not. All are the same attention: each is within the rounding of one
computed in float64. It is what klbench names when it locates such a model's divergence in its attention.
"""

import torch

HEADS, KV_HEADS, SIZE = 16, 4, 128
ROWS = 1016
SLOTS = 8192


class Bench:
    """One sequence of keys, values and queries in a pool with pages of one slot."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = (SLOTS, 1, KV_HEADS, SIZE)
        self.keys = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.queries = torch.randn((ROWS, HEADS, SIZE), device="cuda", dtype=torch.bfloat16)
        self.slots = torch.randperm(SLOTS, device="cuda")[:ROWS].int()

    def attend(self, first: int, end: int, window: int) -> torch.Tensor:
        """The rows [first, end) as the last of a sequence of `end`, in a call of their own."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        lengths = torch.tensor([end], device="cuda", dtype=torch.int32)
        edges = torch.tensor([0, end - first], device="cuda", dtype=torch.int32)
        result: torch.Tensor = flash_attn_with_kvcache(
            q=self.queries[first:end],
            k_cache=self.keys,
            v_cache=self.values,
            page_table=self.slots[None, :end].contiguous(),
            cache_seqlens=lengths,
            cu_seqlens_q=edges,
            cu_seqlens_k_new=torch.tensor([0, end], device="cuda", dtype=torch.int32),
            max_seqlen_q=end - first,
            softmax_scale=SIZE**-0.5,
            causal=True,
            window_size=(window, 0) if window >= 0 else (-1, -1),
            num_splits=1,
        )
        return result


def main() -> None:
    bench = Bench()
    print(f"{'window':7s} {'call':26s} {'rows':5s} differ")
    for window in (-1, 255):
        whole = bench.attend(0, ROWS, window)
        each = range(200, ROWS, 3)
        calls = {
            "extend of 888": (whole[:888], bench.attend(0, 888, window)),
            "chunk from row 512": (whole[512:888], bench.attend(512, 888, window)),
            "chunk from row 500": (whole[500:888], bench.attend(500, 888, window)),
            "decode, one row a call": (
                whole[list(each)],
                torch.cat([bench.attend(row, row + 1, window) for row in each]),
            ),
        }
        for name, (expected, found) in calls.items():
            differ = int((expected != found).reshape(len(found), -1).any(dim=1).sum())
            said = "none" if window < 0 else str(window)
            print(f"{said:7s} {name:26s} {len(found):<5d} {differ}", flush=True)


if __name__ == "__main__":
    main()
