"""Digest capture beside the stock dumper: bytes, files and slowdown for the same request on one server.

    $ python -m tests.bench.capture dense moe swa wide
    dense  bytes: dumper 46.13 MB in 13572 files, digest 1.251 MB in 2, ratio 1/36.9
    dense  decode forward: off 7.10 ms, digest 10.30 ms, dumper 61.00 ms; digest 1.45x, dumper 8.59x
    dense  prefill forward: ...

The request: a prompt of 300 tokens, 64 decode steps, and the cold scoring of all of it. Times are those of
one forward: of a decode step, and of the scoring, each less what a short request takes. They are milliseconds
of processor time of the scheduler's thread, which other work on the machine does not stretch (with `--wall`
those of the clock): medians over the rounds, in which off, digest and dumper take turns. `wide` is the dense
model at width 1024. Targets: bytes at most 1/10 on the demo models and 1/200 at width 1024, forwards slowed
less than twice, state reads counted in.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klbench.zoo import Kind, plain_token_ids, seeded_prompts, zoo_root
from klbench.zoo.architectures import Recipe, recipe
from klbench.zoo.models import make_from_recipe
from tests.insitu.zoo_server import ZooServer, zoo_server

PROMPT_TOKENS = 300
STEPS = 64
SHORT = 8
MODES = ("off", "digest", "dumper")
_WIDER = {128: 1024, 64: 256, 32: 128, 256: 2048}
_ACK_LIMIT_S = 60


def wide_recipe() -> Recipe:
    """The dense recipe at width 1024: 8 heads of 128, 2 of them for keys, an inner width of 2048."""
    dense = recipe("dense")
    config = dense.config | {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "head_dim": 128,
        "intermediate_size": 2048,
    }
    weights = []
    for plan in dense.weights:
        vocabulary = plan.name.endswith(("embed_tokens.weight", "lm_head.weight"))
        rows = plan.shape[0] if vocabulary else _WIDER[plan.shape[0]]
        shape = (rows, *(_WIDER[size] for size in plan.shape[1:]))
        narrower = (plan.shape[1] / shape[1]) ** 0.5 if len(shape) == 2 and "embed" not in plan.name else 1.0
        weights.append(dataclasses.replace(plan, shape=shape, spread=plan.spread * narrower))
    return dataclasses.replace(dense, config=config, weights=tuple(weights))


@dataclasses.dataclass(frozen=True)
class Reading:
    """One round in one mode."""

    decode_ms: float
    prefill_ms: float
    size_bytes: int
    files: int


class Meter:
    """Drives one server; `wall` takes the clock's time instead of the processor's."""

    def __init__(self, server: ZooServer, wall: bool) -> None:
        self._server = server
        self._wall = wall
        self._numbers = itertools.count(1)
        self._pid = next(p["pid"] for p in server.presences() if p["role"] == "scheduler")
        self._prompt = seeded_prompts(1, PROMPT_TOKENS, 11, plain_token_ids())[0]

    def _now_s(self) -> float:
        if self._wall:
            return time.perf_counter()
        spent_ns = Path(f"/proc/{self._pid}/task/{self._pid}/schedstat").read_text().split()[0]
        return int(spent_ns) / 1e9

    def _ask(self, capture: dict[str, Any] | None) -> None:
        number = next(self._numbers)
        control = self._server.control_dir
        draft = control / ".control.draft"
        draft.write_text(json.dumps({"seq": number, "nonce": self._server.nonce, "capture": capture}))
        os.replace(draft, control / "capture-control.json")
        deadline = time.monotonic() + _ACK_LIMIT_S
        while True:
            try:
                answer = json.loads((control / "capture-ack-0.json").read_text())
            except (OSError, ValueError):
                answer = {}
            if answer.get("seq") == number:
                break
            assert time.monotonic() < deadline, "the server does not answer about captures"
            time.sleep(0.002)
        assert answer["ok"], answer["error"]

    def _timed(self, arm: str, input_ids: list[int], new_tokens: int, start: int) -> tuple[float, list[int]]:
        rid = f"klb-{self._server.nonce}-{next(self._numbers)}{arm}+-0"
        self._server.flush()
        body = {
            "rid": [rid],
            "input_ids": [input_ids],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "return_text_in_logprobs": False,
            "logprob_start_len": start,
        }
        began = self._now_s()
        answer = json.loads(self._server.post("/generate", body))[0]
        return self._now_s() - began, answer["output_ids"]

    def round(self, mode: str) -> Reading:
        with tempfile.TemporaryDirectory(prefix="klbench-bench-") as name:
            folder = Path(name)
            if mode != "off":
                self._ask(
                    {
                        "folder": name,
                        "backend": mode,
                        "filter": None,
                        "free_floor_bytes": 1 << 30,
                        "size_cap_bytes": 1 << 40,
                    }
                )
            # The first captured forward registers the hooks: it is not timed.
            self._timed("w", self._prompt[:8], 1, -1)
            one_s, _ = self._timed("w", self._prompt, 1, -1)
            before = _usage(folder)
            many_s, output = self._timed("g", self._prompt, STEPS + 1, -1)
            scoring_s, _ = self._timed("s", self._prompt + output, 0, 0)
            if mode == "dumper":
                size, files = (b - a for a, b in zip(before, _usage(folder), strict=True))
            self._ask(None)
            if mode != "dumper":
                size, files = _usage(folder)
            assert not (folder / "invalid-0.json").exists(), (folder / "invalid-0.json").read_text()
            return Reading(
                decode_ms=(many_s - one_s) / STEPS * 1e3,
                prefill_ms=scoring_s * 1e3,
                size_bytes=size,
                files=files,
            )


def _usage(folder: Path) -> tuple[int, int]:
    """Bytes and files of a trace or of dumps."""
    sizes = [
        path.stat().st_size
        for path in folder.rglob("*")
        if path.suffix in (".pt", ".safetensors") or path.name.startswith("rank0.json")
    ]
    return sum(sizes), len(sizes)


def measure(name: str, rounds: int, wall: bool) -> dict[str, Reading]:
    """The medians of each mode on one model."""
    kind: Kind = "dense" if name == "wide" else name  # type: ignore[assignment]
    model = make_from_recipe(wide_recipe(), zoo_root()) if name == "wide" else None
    with zoo_server(kind, ["--disable-cuda-graph"], model=model) as server:
        meter = Meter(server, wall)
        meter.round("off")
        readings: dict[str, list[Reading]] = {mode: [] for mode in MODES}
        for _ in range(rounds):
            for mode in MODES:
                readings[mode].append(meter.round(mode))
    return {mode: _median(found) for mode, found in readings.items()}


def _median(readings: list[Reading]) -> Reading:
    def middle(field: str) -> Any:
        return statistics.median(getattr(reading, field) for reading in readings)

    return Reading(middle("decode_ms"), middle("prefill_ms"), int(middle("size_bytes")), int(middle("files")))


def lines(name: str, found: dict[str, Reading]) -> Iterator[str]:
    digest, dumper = found["digest"], found["dumper"]
    yield (
        f"{name:6s} bytes: dumper {dumper.size_bytes / 1e6:.2f} MB in {dumper.files} files, "
        f"digest {digest.size_bytes / 1e6:.3f} MB in {digest.files}, "
        f"ratio 1/{dumper.size_bytes / digest.size_bytes:.1f}"
    )
    for field, what in (("decode_ms", "decode forward"), ("prefill_ms", "prefill forward")):
        plain = getattr(found["off"], field)
        parts = [f"{mode} {getattr(found[mode], field):.2f} ms" for mode in MODES]
        ratios = [f"{mode} {getattr(found[mode], field) / plain:.2f}x" for mode in MODES[1:]]
        yield f"{name:6s} {what}: {', '.join(parts)}; {', '.join(ratios)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=["dense", "moe", "swa", "wide"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wall", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.models:
        for line in lines(name, measure(name, arguments.rounds, arguments.wall)):
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
