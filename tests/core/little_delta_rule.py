"""A gated delta rule of a few heads, as kernels compute it: scanned in chunks, stepped from row to row.

Prefill scans: gates and sums in float32, everything between (normed q and k, beta, the inverse of a chunk's
matrix, what is written, the state as it is multiplied) in bfloat16. Decode steps in float32 behind the same
bfloat16 convolution; its state is kept in float32 or in bfloat16.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from klbench.core.delta_rule_reference import DeltaRows, DeltaRule

Floats = npt.NDArray[np.float64]
Rounds = Callable[[Floats], Floats]
BF16 = 7


def bf16(values: Floats) -> Floats:
    """Rounded to bfloat16."""
    bits = np.asarray(values).astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def f32(values: Floats) -> Floats:
    return np.asarray(values).astype(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Heads:
    """What the recurrence reads: q, k [T, heads, d_k], v [T, heads, d_v], g and beta [T, heads]."""

    q: Floats
    k: Floats
    v: Floats
    g: Floats
    beta: Floats


class LittleDeltaRule:
    """Seeded parameters and rows. `slow` is the gate's size (a row forgets about so much), None: of all
    sizes; `alike` how much of each row is the same in all of them."""

    def __init__(
        self,
        seed: int,
        rows: int = 300,
        *,
        keys: int = 2,
        values: int = 4,
        depth: int = 32,
        width: int = 4,
        slow: float | None = None,
        alike: float = 0.0,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        random = np.random.Generator(np.random.PCG64(seed))
        channels = 2 * keys * depth + values * depth
        own = random.standard_normal((rows, channels))
        mixed = scale * ((1 - alike) * own + alike * random.standard_normal(channels))
        self.mixed = bf16(mixed * np.exp(0.5 * random.standard_normal(channels)))
        self.a, self.b = (bf16(random.standard_normal((rows, values))) for _ in "ab")
        sizes = random.uniform(0.5, 16, values) if slow is None else slow * random.uniform(0.5, 2, values)
        step = np.exp(random.uniform(np.log(1e-3), np.log(0.1), values))
        self.rule = DeltaRule(
            conv=bf16(0.5 * random.standard_normal((channels, width))),
            bias=bf16(random.standard_normal(channels)) if bias else None,
            silu=True,
            a_log=f32(np.log(sizes)),
            dt_bias=bf16(step + np.log(-np.expm1(-step))),
            keys=keys,
            values=values,
            d_k=depth,
            d_v=depth,
        )

    def __len__(self) -> int:
        return len(self.mixed)

    def heads(self, rounds: Rounds, taps: Iterable[int] | None = None) -> Heads:
        """`rounds` what is normed and beta; `taps` of the convolution's window that are used (None: all)."""
        rule, rows = self.rule, len(self)
        width = rule.conv.shape[1]
        padded = np.vstack([np.zeros((width - 1, self.mixed.shape[1])), self.mixed])
        x = sum(padded[t : t + rows] * rule.conv[:, t] for t in (range(width) if taps is None else taps))
        x = x + (0.0 if rule.bias is None else rule.bias)
        q, k, v = np.split(
            bf16(x / (1 + np.exp(-x))), [rule.keys * rule.d_k, 2 * rule.keys * rule.d_k], axis=1
        )

        def normed(part: Floats) -> Floats:
            part = part.reshape(rows, rule.keys, rule.d_k)
            part = rounds(part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6))
            return np.repeat(part, rule.values // rule.keys, axis=1)

        return Heads(
            normed(q),
            normed(k),
            v.reshape(rows, rule.values, rule.d_v),
            f32(-np.exp(rule.a_log) * np.logaddexp(0, self.a + rule.dt_bias)),
            rounds(1 / (1 + np.exp(-self.b))),
        )

    def nothing(self) -> Floats:
        return np.zeros((self.rule.values, self.rule.d_k, self.rule.d_v))

    def scan(self, stop: int, rounds: Rounds = bf16, chunk: int = 64) -> tuple[Floats, Floats]:
        """The outputs [T, heads, d_v] of the rows before `stop` and the state behind them."""
        given, state = self.heads(rounds), self.nothing()
        out = np.zeros((len(self), *state.shape[::2]))
        for first in range(0, stop, chunk):
            rows = slice(first, min(first + chunk, stop))
            k, q, v = (part[rows].transpose(1, 0, 2) for part in (given.k, given.q, given.v))
            beta, faded = given.beta[rows].T[..., None], np.cumsum(given.g[rows], 0).T
            decay = np.exp(np.where(np.tri(k.shape[1]) > 0, faded[..., None] - faded[:, None], -np.inf))
            begun = np.exp(faded)[..., None]
            lower = np.tril(beta * decay * (k @ k.transpose(0, 2, 1)), -1)
            inverse = rounds(np.linalg.inv(np.eye(k.shape[1]) + lower))
            held = rounds(state)
            written = rounds(inverse @ rounds(beta * v)) - rounds(inverse @ rounds(beta * begun * k)) @ held
            seen = rounds(decay * (q @ k.transpose(0, 2, 1)))
            made = (begun * (q @ held) + seen @ rounds(written)) * self.rule.d_k**-0.5
            out[rows] = bf16(made).transpose(1, 0, 2)
            added = k.transpose(0, 2, 1) @ rounds(written * decay[:, -1, :, None])
            state = f32(begun[:, -1:] * state + added)
        return out, state

    def step(
        self,
        first: int,
        state: Floats,
        *,
        kept: Rounds = f32,
        without: Iterable[int] = (),
        taps: Iterable[int] | None = None,
    ) -> Floats:
        """The outputs [T, heads, d_v] from row `first` on; rows `without` are not written to the state."""
        given, missed = self.heads(f32, taps), set(without)
        out = np.zeros((len(self), *state.shape[::2]))
        state = kept(state)
        for row in range(first, len(self)):
            if row not in missed:
                state = state * np.exp(given.g[row])[:, None, None]
                recalled = np.einsum("hkv,hk->hv", state, given.k[row])
                written = given.beta[row][:, None] * (given.v[row] - recalled)
                state = kept(state + given.k[row][:, :, None] * written[:, None, :])
            out[row] = bf16(np.einsum("hkv,hk->hv", state, given.q[row]) * self.rule.d_k**-0.5)
        return out

    def rows(self, decode: Floats, scoring: Floats, first: int, count: int = 24) -> DeltaRows:
        """`count` rows from `first` on, as they are judged."""
        at = np.arange(first, min(first + count, len(self)))
        mixed = self.mixed.astype(np.float32)
        return DeltaRows(at, mixed, self.a, self.b, decode[at], scoring[at], BF16)
