"""The text of the guided path: its steps and its words. Data alone; guide.py says where one stands.

`short` says in one line why a step matters, `why` and `how` are for the reader who has time. `key` is the key
in the workbench where the evidence names no other, `command` does the step without it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the path and the question that it answers."""

    code: str
    title: str
    question: str
    short: str
    why: str
    how: str
    key: str
    command: str


STEPS: tuple[Step, ...] = (
    Step(
        "server",
        "a deterministic server, read back",
        "Does the server run as it was asked to?",
        "Flags can be ignored or overruled: believe what the server says of itself.",
        "Without deterministic inference every operator may round differently with every batch, and that "
        "noise hides all else. Flags can be ignored, overruled or switch each other off: believe what the "
        "server says of itself, not what was typed.",
        "Start it with --enable-deterministic-inference (klbench does) and look at what is in force: "
        "attention backend, radix cache, page size, K/V dtype.",
        "l",
        "klbench run --launch MODEL_PATH",
    ),
    Step(
        "helpers",
        "the three helpers, as CI runs them",
        "Which requests differ, and by how much?",
        "A helper that hit nothing has passed nothing, and a mean hides its tail.",
        "match compares decode with a cold prefill; the two cache helpers compare generation behind a "
        "restored prefix with a cold prefill. A helper that could not run, or hit nothing, has passed "
        "nothing. The mean hides the tail: look at the maximum and at how many tokens differ at all.",
        "Run 32 requests of 512 tokens. Fewer may miss a rare divergence.",
        "r",
        "klbench run --launch MODEL_PATH --json result.json",
    ),
    Step(
        "condition_1",
        "settle condition 1: batch invariance",
        "Does a token's result depend on which other tokens share its forward?",
        "It comes first because its noise hides condition 2.",
        "It is settled first because its noise hides condition 2. Cold requests that differ show it, but "
        "so does a window that is off by one: small differences from the first decoded token speak for "
        "rounding, a constant position for a tile, a constant offset for something that decode does after "
        "so many steps.",
        "Look at the residues and at the first divergence: absolute, from the prompt's end, from the "
        "cached tokens. Census calls each operator alone with other row counts; the equal-M experiment "
        "compares decode and a one-token extend with the same rows.",
        "v",
        "klbench census --launch MODEL_PATH",
    ),
    Step(
        "condition_2",
        "settle condition 2: the same function",
        "Do decode, prefill and a restored prefix compute the same function of the same state?",
        "A wrong restore and arithmetic of few rows look alike until they are told apart.",
        "With cold requests clean, a divergence of hits alone points at what was restored. But extends of "
        "few rows exist on hits only, so arithmetic of few rows looks the same until the restore is tried "
        "with a wide extend.",
        "Judge by each request's cached tokens, not by the helper's name. Try the same restore with a wide "
        "extend, and other page sizes; predict a residue and pad the prompts to it.",
        "v",
        "klbench experiment wide_restore --launch MODEL_PATH",
    ),
    Step(
        "locate",
        "locate the origin",
        "At which operator and position is the divergence born?",
        "The first difference in layer order is not the origin: it may be inherited.",
        "The first difference in layer order is not the origin: an operator that reads K/V of earlier rows "
        "inherits theirs. The origin is where every input and the state read are equal and the output "
        "differs.",
        "Capture repeats the same batch with digests of every row, pairs rows by position and proves it, "
        "and names the operator.",
        "o",
        "klbench locate --launch MODEL_PATH",
    ),
    Step(
        "confirm",
        "confirm it",
        "Does it hold when it is tried to be refuted?",
        "A finding is only probable until somebody has tried to refute it.",
        "A finding is only probable until the divergence shows under capture settings, capture changes no "
        "logprob, and a repeat gives the same origin. Repeats with equal bits exclude a race up to a rate; "
        "other bits in equal batches prove one.",
        "Repeat the run; replay the operator alone with other row counts, or where it cannot be called alone "
        "compute the same rows in forwards of other row counts; compare one row as decode and as a one-token "
        "extend. Change what should not matter (overlap, graphs, page size) and compare bits.",
        "X",
        "klbench experiment repeats --launch MODEL_PATH",
    ),
    Step(
        "report",
        "report it",
        "Can somebody else see it?",
        "An answer must leave the terminal with its evidence and what was not checked.",
        "An answer must leave the terminal with its evidence, what was not checked, and the commands that "
        "repeat it.",
        "Write the report; after a mend run the same prompts again: a large fault may have hidden a "
        "smaller one.",
        "e",
        "klbench report SESSION",
    ),
)

GLOSSARY: dict[str, str] = {
    "arm": (
        "one pass over the prompts: warming fills the cache, generation generates, scoring scores the same "
        "tokens in a cold prefill"
    ),
    "batch invariance": (
        "a token's result does not depend on how many or which tokens share its forward, nor on how a kernel "
        "divides its keys"
    ),
    "bit-equal": "the same float32 bits; two logprobs that print alike may still differ",
    "cached tokens": "how many tokens of a request's prompt came from the radix cache instead of a forward",
    "capture": "the arms once more, with a digest of every operator's inputs, outputs and state read",
    "census": (
        "each stateless operator called again with 1, 2, 3 and powers of two of its rows: which of them "
        "change a row's bits"
    ),
    "cold": "a request that restored nothing before it generated",
    "condition 1": (
        "batch invariance: a token's result does not depend on how many or which tokens share its forward"
    ),
    "condition 2": (
        "the same function: same K/V, window, mask, positions and state, whichever way a token is computed"
    ),
    "deterministic": "inference whose kernels do not let a token's result depend on the rest of its batch",
    "digest": "128 bits made of a row's exact bits: equal digests, equal rows",
    "divergence": "a token whose two logprobs are not bit-equal",
    "equal-M": "the same token computed as decode and as a one-token extend, with as many rows in both",
    "extend": "the forward that computes the part of a prompt that was not cached",
    "fault": "a defect planted on purpose, in the demo and by klbench selftest",
    "finding": "an origin with its evidence and grade: confirmed, probable or unknown",
    "floor": (
        "the divergence that remains where prefill and decode are two algorithms; not every model can "
        "reach zero"
    ),
    "gap": "what lies between two hooked operators: A's output is equal, B's input is not",
    "grade": "confirmed, probable or unknown: how far the evidence goes; a run alone never confirms",
    "helper": "match, prefill_cache_hit or decode_cache_hit, as sglang's kl_test_utils defines them",
    "hit": "a request that restored a cached prefix",
    "k3": (
        "exp(r) - 1 - r with r = prefill logprob - decode logprob of the sampled token: an estimate of the "
        "KL divergence, in nats"
    ),
    "latent": "a difference that reaches no divergent token: signed zeros, padding, the order of ties",
    "M": "how many rows share one call of an operator",
    "masked": "an operator downstream of an origin that never saw equal inputs, so nothing is said of it",
    "nats": "units of a logarithm to the base e; 1e-9 nats is sglang's gate",
    "offset": "index of a token among the generated ones",
    "operator": (
        "the innermost call that is watched: a module, a step of the head (lm_head, logits, logprob), or a "
        "named gap between two of them"
    ),
    "origin": (
        "the operator and position where every input and the state read are equal and the output differs"
    ),
    "position": "index of a token in prompt and output together; the row before it scores it",
    "page": "so many tokens of K/V are kept together: hits come in whole pages",
    "race": "what is read depends on when it was written: equal batches give other bits",
    "radix cache": "prefixes kept between requests, so that a prompt that begins alike is not computed again",
    "replay": "the operator called again alone, on the same rows, with other row counts",
    "request": "one prompt of a run and its generated tokens",
    "residue": (
        "what is left of a length or position divided by a page, chunk, window or tile: the strongest clue"
    ),
    "restore": "taking a prefix's K/V or state from the cache instead of computing it",
    "row": "what one forward computes for one position; the row at t-1 scores the token at t",
    "run": "one or more helpers, made on one server with one set of prompts",
    "runner": "the process that owns a session's server and work",
    "server": "one running sglang, launched by klbench or attached to",
    "session": "everything kept of one investigation: server, runs, traces, findings, reports",
    "sliding window": "a layer reads only so many keys back; its edge is a place for faults of one",
    "tile": "keys are summed in blocks of 64 to 256; another block size is another rounding",
    "trace": "what was captured of the operators of the arms",
    "ulp": "unit in the last place: the distance to the next number that the dtype can hold",
    "wide extend": "a restored prefix with many prompt rows behind it, so that no call has few rows",
}
