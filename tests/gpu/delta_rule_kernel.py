"""The gated delta rule alone, without a server: prefill's chunked scan and decode's steps beside float64.

    $ python3 -m tests.gpu.delta_rule_kernel [FILE]     # on a GPU, with sglang 0.5.17 importable

Each row's error is the largest of its heads, in roundings of bfloat16 (2^-9) of the head's largest output.
`stale` decodes on from the state of 31 rows earlier, `other` from another sequence's. FILE gets inputs,
parameters and outputs as safetensors.
"""

import sys

import torch

HEADS, SIZE, WIDTH = 8, 128, 4
ROWS, PROMPT, STALE = 736, 607, 576
DEVICE = "cuda"


class Bench:
    """One layer's parameters, and the inputs of one sequence."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        channels = 3 * HEADS * SIZE

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE)

        self.mixed = normal(ROWS, channels).bfloat16()
        self.a, self.b = normal(ROWS, HEADS).bfloat16(), normal(ROWS, HEADS).bfloat16()
        torch.manual_seed(1)
        self.weight = (normal(channels, WIDTH) * WIDTH**-0.5).bfloat16()
        self.a_log, self.dt_bias = normal(HEADS) * 0.5, normal(HEADS) * 0.5
        self.conv = torch.zeros(4, channels, WIDTH - 1, device=DEVICE, dtype=torch.bfloat16)
        self.state = torch.zeros(4, HEADS, SIZE, SIZE, device=DEVICE)

    def scan(self, end: int, slot: int) -> torch.Tensor:
        """The rows [0, end) as one prefill; leaves its states in `slot`. [end, heads, size]."""
        from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
        from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
        from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_fn

        starts = torch.tensor([0, end], device=DEVICE, dtype=torch.int32)
        slots = torch.tensor([slot], device=DEVICE, dtype=torch.int32)
        mixed = causal_conv1d_fn(
            self.mixed[:end].clone().transpose(0, 1),
            self.weight,
            None,
            activation="silu",
            conv_states=self.conv,
            has_initial_state=torch.tensor([False], device=DEVICE),
            cache_indices=slots,
            query_start_loc=starts,
            seq_lens_cpu=[end],
        ).transpose(0, 1)[:end]
        q, k, v = (part.reshape(1, end, HEADS, SIZE).contiguous() for part in mixed.split(HEADS * SIZE, -1))
        g, beta = fused_gdn_gating(self.a_log, self.a[:end], self.b[:end], self.dt_bias)
        out, _, _ = chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=self.state,
            initial_state_indices=slots,
            cu_seqlens=starts,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )
        result: torch.Tensor = out[0]
        return result

    def steps(self, first: int, end: int, slot: int) -> torch.Tensor:
        """The rows [first, end) one by one on the states in `slot`, as decode makes them."""
        from sglang.kernels.ops.attention.fla.fused_recurrent import (
            fused_recurrent_gated_delta_rule_packed_decode,
        )
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

        slots = torch.tensor([slot], device=DEVICE, dtype=torch.int32)
        rows = []
        for row in range(first, end):
            mixed = causal_conv1d_update(
                self.mixed[row : row + 1].clone(),
                self.conv,
                self.weight,
                None,
                "silu",
                conv_state_indices=slots,
            )
            out = mixed.new_empty(1, 1, HEADS, SIZE)
            fused_recurrent_gated_delta_rule_packed_decode(
                mixed_qkv=mixed,
                a=self.a[row : row + 1],
                b=self.b[row : row + 1],
                A_log=self.a_log,
                dt_bias=self.dt_bias,
                scale=SIZE**-0.5,
                initial_state=self.state,
                out=out,
                ssm_state_indices=slots,
                use_qk_l2norm_in_kernel=True,
            )
            rows.append(out[0, 0])
        return torch.stack(rows)

    def exact(self) -> torch.Tensor:
        """All rows in float64, from a state of zeros."""
        mixed = torch.nn.functional.pad(self.mixed.double(), (0, 0, WIDTH - 1, 0))
        weight = self.weight.double()
        summed = torch.stack([mixed[at : at + ROWS] * weight[:, at] for at in range(WIDTH)]).sum(0)
        q, k, v = (
            part.reshape(ROWS, HEADS, SIZE)
            for part in torch.nn.functional.silu(summed).split(HEADS * SIZE, -1)
        )
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * SIZE**-0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        decay = torch.nn.functional.softplus(self.a.double() + self.dt_bias.double())
        decay = (-self.a_log.double().exp() * decay).exp()
        beta = self.b.double().sigmoid()
        state = torch.zeros(HEADS, SIZE, SIZE, device=DEVICE, dtype=torch.float64)
        rows = []
        for row in range(ROWS):
            state = state * decay[row, :, None, None]
            seen = torch.einsum("hkv,hk->hv", state, k[row])
            new = (v[row] - seen) * beta[row, :, None]
            state = state + torch.einsum("hk,hv->hkv", k[row], new)
            rows.append(torch.einsum("hkv,hk->hv", state, q[row]))
        return torch.stack(rows)


def roundings(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Each row's error as the module's docstring defines it; [rows]."""
    scale = exact.abs().amax(-1) * 2.0**-9
    return ((found.double() - exact).abs().amax(-1) / scale).amax(-1)


def main() -> None:
    bench, other = Bench(7), Bench(8)
    exact = bench.exact()
    whole = bench.scan(ROWS, 0)
    bench.scan(PROMPT, 1)
    decoded = bench.steps(PROMPT, ROWS, 1)
    bench.scan(STALE, 2)
    conv = bench.conv[1].clone()
    stale = bench.state[2].clone()
    bench.scan(PROMPT, 2)
    bench.state[2] = stale
    stale_rows = bench.steps(PROMPT, ROWS, 2)
    other.scan(PROMPT, 3)
    bench.conv[3], bench.state[3] = conv, other.state[3]
    other_rows = bench.steps(PROMPT, ROWS, 3)
    print(f"{'way':22s} {'rows':5s} {'first':>8s} {'median':>8s} {'largest':>8s}")
    for name, rows, first in (
        ("scan of all", whole, 0),
        ("the same, from 607", whole[PROMPT:], PROMPT),
        ("scan of 607, steps", decoded, PROMPT),
        ("stale by 31 rows", stale_rows, PROMPT),
        ("another's state", other_rows, PROMPT),
    ):
        off = roundings(rows, exact[first : first + len(rows)])
        print(f"{name:22s} {len(rows):<5d} {off[0]:8.2f} {off.median():8.2f} {off.max():8.2f}", flush=True)
    differ = int((whole[PROMPT:] != decoded).reshape(len(decoded), -1).any(dim=1).sum())
    print(f"{differ} of {len(decoded)} rows differ between the scan and the steps")
    if len(sys.argv) > 1:
        from safetensors.torch import save_file

        kept = {
            **{name: getattr(bench, name) for name in ("mixed", "a", "b", "weight", "a_log", "dt_bias")},
            "exact": exact[PROMPT:],
            "whole": whole[PROMPT:],
            "decoded": decoded,
            "stale": stale_rows,
            "other": other_rows,
        }
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, sys.argv[1])


if __name__ == "__main__":
    main()
