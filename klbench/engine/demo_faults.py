"""Faults for the demo: refused before anything is started where they cannot fire, and given what they need.

faults = checked_faults("chunk-key", "dense")
needed_by(faults).arguments                  ("--chunked-prefill-size", "128")
check_can_fire(faults, samples=32, new_tokens=128, tokens=300)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klbench.errors import UsageError
from klbench.insitu.faults_catalogue import CATALOGUE, PAIR_CATALOGUE, ArmedFault, parse_faults, unfit
from klbench.zoo import SLIDING_WINDOW, Kind, layer_kinds

_LIST = "klbench demo --list-faults"
_HITS = ("prefill_cache_hit", "decode_cache_hit")


@dataclass(frozen=True, slots=True)
class Needed:
    """What a demo's server is started with so that its faults can fire; the user's own always wins."""

    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


NEEDED = {
    # The demo's prompts have about 300 tokens.
    "chunks": Needed(arguments=("--chunked-prefill-size", "128")),
    # An overlapping scheduler throws away a forward that a retraction outran, with what was planted in it.
    "retraction": Needed(("--disable-overlap-schedule",), (("SGLANG_TEST_RETRACT", "1"),)),
}
"""By the needs of faults_truth.NEEDS that a server decides."""


def checked_faults(text: str, model: Kind) -> tuple[ArmedFault, ...]:
    """The faults that `text` spells. Raises UsageError where they cannot be planted in `model`."""
    try:
        faults = parse_faults(text)
    except ValueError as error:
        raise UsageError(str(error), next=_LIST) from error
    layers = layer_kinds(model)
    for armed in faults:
        why = unfit(armed, model, layers)
        if why is not None:
            raise UsageError(why, next=f"{_LIST} says where each fault has a place")
    return faults


def faults_of(model: Kind) -> tuple[str, ...]:
    """The names of the faults and pairs that have their places in `model`, in the catalogue's order."""
    layers = layer_kinds(model)
    return tuple(
        name
        for name in (*CATALOGUE, *PAIR_CATALOGUE)
        if all(unfit(armed, model, layers) is None for armed in parse_faults(name))
    )


def needed_by(faults: Sequence[ArmedFault]) -> Needed:
    """What the faults need of the server."""
    needs = dict.fromkeys(need for armed in faults for need in armed.fault.truth.needs)
    found = [NEEDED[need] for need in needs if need in NEEDED]
    return Needed(
        tuple(argument for one in found for argument in one.arguments),
        tuple(variable for one in found for variable in one.environment),
    )


def fitting_samples(faults: Sequence[ArmedFault], samples: int) -> int:
    """`samples`, or the next smaller number of prompts with which all faults can fire."""
    pads = [armed.parameters["pad"] for armed in faults if "padding" in armed.fault.truth.needs]
    while samples > 1 and any(samples % pad == 0 for pad in pads):
        samples -= 1
    return samples


def check_can_fire(
    faults: Sequence[ArmedFault],
    *,
    samples: int,
    new_tokens: int,
    tokens: int,
    helpers: Sequence[str] = (),
) -> None:
    """Raises UsageError where what is asked for cannot make each fault fire: its run would look like a pass.

    `tokens` is about how long the prompts are; `helpers` empty stands for all.
    """
    for armed in faults:
        refused = _why_not(armed, samples, new_tokens, tokens, helpers)
        if refused is not None:
            why, next = refused
            raise UsageError(f"fault {armed.fault.name} cannot fire here", why=why, next=next)


def _why_not(
    armed: ArmedFault, samples: int, new_tokens: int, tokens: int, helpers: Sequence[str]
) -> tuple[str, str] | None:
    needs, parameters = armed.fault.truth.needs, armed.parameters
    pad = parameters.get("pad", 1)
    if "others" in needs and samples < 2:
        return "it needs another request in the batch", "give --samples 2 or more"
    if "padding" in needs and samples % pad == 0:
        return (
            f"decode batches of {samples} rows are a multiple of its pad={pad}: nothing is filled up",
            f"give --samples {samples - 1}" if samples > 1 else "give another --samples",
        )
    if "hits" in needs and helpers and not set(helpers) & set(_HITS):
        return (
            f"it needs requests that begin on a restored prefix, and {', '.join(helpers)} makes none",
            f"add --helper {_HITS[0]}",
        )
    if "window" in needs and tokens + new_tokens <= SLIDING_WINDOW:
        return (
            f"no request of {tokens} + {new_tokens} tokens crosses the window of {SLIDING_WINDOW}",
            f"give --prompt-tokens {2 * SLIDING_WINDOW}",
        )
    # The first token comes of the prefill.
    steps = new_tokens - 1
    for name, least in (("after", 1), ("step", 0)):
        if name in parameters and steps < parameters[name] + least:
            return (
                f"{new_tokens} new tokens are {steps} decode steps, and it has {name}={parameters[name]}",
                f"give --max-new-tokens {parameters[name] + least + 1} or more",
            )
    return None
