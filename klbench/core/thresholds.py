"""The numbers that judge a measurement; all in nats unless the name says otherwise.

A threshold moves only the line between clean and diverged. Divergent tokens, tokens whose two logprobs are
not bit-equal, are always counted.
"""

from __future__ import annotations

BIT_EQUAL_NATS = 0.0
"""The default threshold: clean means that every token is bit-equal."""

SGLANG_GATE_NATS = 1e-9
"""What sglang's own tests let pass where prefill and decode should agree."""

FRACTIONS_PAST: tuple[tuple[str, float], ...] = tuple(
    (f"1e-{exponent}" if exponent else "1", 10.0**-exponent) for exponent in range(9, -1, -1)
)
"""How differences are binned: which part of the tokens differs by more than 1e-9 ... 1 nats."""

MIN_HIT_FRACTION = 0.5
"""More than this part of the requests must have hit the cache, as in sglang's helpers."""

USUAL_REQUESTS = 32
USUAL_TOKENS = 512
"""sglang's usual measurement; the mean of fewer samples moves a lot."""
