"""Aligning and localising a whole trace, of 100,000 to 10 million row digests, beside one pass over them.

    $ uv run python -m tests.bench.localise --write
    | digests | align | localise | both, processor | one pass over the digests | ratio |

The trace is of one request of a model of 36 layers with a fault in decode in one operator: every operator of
the generation arm (one prefill, then decode steps) and of the scoring arm has one digest for each row of each
input and output, as capture writes them. Budget: comparing and localising 10 million in under a second.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from klbench.core.alignment import Alignment, align
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Direction, Operator, Phase, Trace
from tests.bench.measure import benchmark, markdown, publish, take_turns, where

LAYERS = 36
LEAVES = ("norm", "qkv", "rope", "attn", "o", "norm2", "up", "down")
DECODE_STEPS = 128


def operators() -> tuple[Operator, ...]:
    """A decoder's call sites in execution order, containers included."""
    paths = [("model.embed_tokens", "VocabParallelEmbedding", False)]
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        paths += [(f"{base}.{leaf}", leaf, False) for leaf in LEAVES]
    paths += [("model.norm", "RMSNorm", False)]
    return tuple(
        Operator(path, name, 0, order, container, "kv" if path.endswith(".attn") else None)
        for order, (path, name, container) in enumerate(paths)
    )


def make_trace(digests: int) -> tuple[Trace, np.ndarray]:
    """A trace of about `digests` digests with one planted origin, and the divergent positions.

    The origin is layer 1's `o` at the first decoded row; everything behind it differs too.
    """
    sites = operators()
    per_row = 2 * len(sites)
    rows = max(DECODE_STEPS + 32, digests // (2 * per_row))
    prompt = rows - DECODE_STEPS
    forwards = [(Arm.GENERATION, Phase.EXTEND, 0, prompt)]
    forwards += [(Arm.GENERATION, Phase.DECODE, at, at + 1) for at in range(prompt, rows)]
    forwards += [(Arm.SCORING, Phase.EXTEND, 0, rows)]
    fault = next(site.order for site in sites if site.module == "model.layers.1.o")

    arms = np.array([arm for arm, *_ in forwards])
    phases = np.array([phase for _, phase, *_ in forwards])
    sizes = np.array([last - first for *_, first, last in forwards])
    position = np.concatenate([np.arange(first, last) for *_, first, last in forwards])
    of_forward = np.repeat(np.arange(len(forwards)), sizes)
    row_start = np.concatenate([[0], np.cumsum(sizes)])

    # Tensors of a forward: in and out of each operator, in order.
    tensors = len(forwards) * per_row
    tensor_forward = np.repeat(np.arange(len(forwards)), per_row)
    order = np.tile(np.repeat(np.arange(len(sites)), 2), len(forwards))
    direction = np.tile([Direction.IN, Direction.OUT], len(forwards) * len(sites))
    tensor_rows = sizes[tensor_forward]
    starts = np.concatenate([[0], np.cumsum(tensor_rows)])
    tensor_of = np.repeat(np.arange(tensors), tensor_rows)
    row = row_start[tensor_forward[tensor_of]] + np.arange(starts[-1]) - starts[tensor_of]

    # A tensor's digest is that of the value that flows there: an operator's input is the last one's output.
    value = order[tensor_of] + (direction[tensor_of] == Direction.OUT)
    wrong = (arms[of_forward[row]] == Arm.GENERATION) & (position[row] >= prompt) & (value > fault)
    low = (value.astype(np.uint64) << np.uint64(32)) + position[row].astype(np.uint64)
    digest = np.stack([low * np.uint64(0x9E3779B97F4A7C15) + wrong.astype(np.uint64), low], axis=1)

    none = np.zeros(0, dtype=np.int64)
    no_digest = np.zeros((0, 2), dtype=np.uint64)
    trace = Trace(
        backend="digest",
        operators=sites,
        arguments=("0",),
        dtypes=("bfloat16",),
        observes_state=False,
        observes_head=False,
        invalid=None,
        forward_number=np.arange(1, len(forwards) + 1),
        forward_rank=np.zeros(len(forwards), dtype=np.int64),
        forward_rows=sizes,
        forward_requests=np.ones(len(forwards), dtype=np.int64),
        row_forward=of_forward,
        row_arm=arms[of_forward],
        row_request=np.zeros(len(position), dtype=np.int64),
        row_position=position,
        row_in_batch=np.arange(len(position)) - row_start[of_forward],
        row_phase=phases[of_forward],
        row_token=position % 1000,
        tensor_forward=tensor_forward,
        tensor_operator=order,
        tensor_direction=direction,
        tensor_argument=np.zeros(tensors, dtype=np.int64),
        tensor_dtype=np.zeros(tensors, dtype=np.int64),
        tensor_row_bytes=np.full(tensors, 4096),
        tensor_event=np.tile(np.arange(per_row), len(forwards)),
        tensor_rows=tensor_rows,
        tensor_start=starts[:-1],
        tensor_row=row,
        digest=digest,
        read_row=none,
        read_operator=none,
        read_argument=none,
        read_low=none,
        read_high=none,
        read_digest=no_digest,
        slot_kind=none,
        slot_forward=none,
        slot_operator=none,
        slot_argument=none,
        slot_event=none,
        slot_request=none,
        slot_position=none,
        slot_pool=none,
        slot_digest=no_digest,
    )
    return trace, np.arange(prompt + 1, rows)


def one_pass(trace: Trace) -> Callable[[], object]:
    """The floor: every digest is read once and compared with its neighbour."""
    return lambda: np.count_nonzero(trace.digest[1:] != trace.digest[:-1])


def row_of(size: int, rounds: int) -> list[str]:
    trace, divergent = make_trace(size)
    aligned: list[Alignment] = []

    def aligning() -> None:
        aligned[:] = [align(trace, 0)]

    aligning()
    found = localise(trace, aligned, divergent)
    assert [finding.module for finding in found.findings] == ["model.layers.1.o"]
    taken = take_turns(
        {
            "align": aligning,
            "localise": lambda: localise(trace, aligned, divergent),
            "pass": one_pass(trace),
        },
        rounds,
    )
    both = taken["align"].cpu_s + taken["localise"].cpu_s
    return [
        f"{len(trace.digest):,}",
        f"{taken['align'].wall_s:.3f} s",
        f"{taken['localise'].wall_s:.3f} s",
        f"{both:.3f} s",
        f"{taken['pass'].wall_s:.3f} s",
        f"{both / taken['pass'].cpu_s:.1f}x",
    ]


def lines(sizes: list[int], rounds: int) -> list[str]:
    head = ["digests", "align", "localise", "both, processor", "one pass over the digests", "both over it"]
    return [where(), "", *markdown(head, [row_of(size, rounds) for size in sizes])]


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    given = parser.parse_args()
    publish("bench-localise", lines(given.sizes, given.rounds), write=given.write)


if __name__ == "__main__":
    main()
