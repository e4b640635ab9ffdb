"""The list that is run on a GPU: what each row starts, and what its answer must be.

A row is `wrong` where its check (truth.py, truth_of_origins.py) finds what contradicts what is known,
`undecided` where something is left open, else `right`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import truth, truth_of_origins
from tests.gpu.judgement import Documents, Judgement

FP8_PROMPTS = (21, 24, 27, 30, 33, 36, 39, 42)
"""Prompt lengths of the row with fp8 keys and values."""


@dataclass(frozen=True)
class Place:
    """Where a row works: its folder, its port, the models by name."""

    folder: Path
    port: int
    models: Mapping[str, Path]

    @property
    def flags(self) -> list[str]:
        """Several servers share one GPU: a small share each, and ports that cannot meet."""
        return [
            *("--mem-fraction-static", "0.6"),
            *("--max-total-tokens", "65536"),
            *("--port", str(self.port)),
        ]


@dataclass(frozen=True)
class Row:
    """`number` is the row's place in the list; `commands` are run one after the other."""

    name: str
    number: int
    models: tuple[str, ...]
    what: str
    commands: Callable[[Place], list[list[str]]]
    check: Callable[[Documents], Judgement]
    """What is not as it must be, and what is left open."""
    says: Callable[[Documents], str]
    """The row's result in a few words."""
    gpus: int = 1
    alone: bool = False
    """It measures time, so nothing else runs beside it."""


def _klbench(place: Place, command: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    return [
        *("python3", "-m", "klbench", command, "--session", str(place.folder / "session")),
        *("--json", str(place.folder / f"{command}.json")),
        *arguments,
        *("--", *place.flags, *flags),
    ]


def _report(place: Place) -> list[list[str]]:
    base = ["python3", "-m", "klbench", "report", str(place.folder / "session"), "--redact"]
    return [
        [*base, "--format", form, "--output", str(place.folder / f"report.{suffix}")]
        for form, suffix in (("md", "md"), ("json", "json"))
    ]


def _clean(model: str, *options: str, flags: tuple[str, ...] = ()) -> Callable[[Place], list[list[str]]]:
    def commands(place: Place) -> list[list[str]]:
        base = ["python3", "-m", "tests.gpu.clean", str(place.models[model])]
        base += ["--json", str(place.folder / "clean.json"), *options, "--flags", *place.flags, *flags]
        return [base]

    return commands


def _run(model: str, *flags: str) -> Callable[[Place], list[list[str]]]:
    return lambda place: [
        _klbench(
            place,
            "run",
            *("--launch", str(place.models[model]), "--samples", "32", "--prompt-tokens", "600"),
            *("--max-new-tokens", "128", "--ready-to-capture"),
            flags=flags,
        )
    ]


def _locate(
    model: str, *flags: str, options: tuple[str, ...] = ("--samples", "32", "--prompt-tokens", "600")
) -> Callable[[Place], list[list[str]]]:
    return lambda place: [
        _klbench(
            place,
            "locate",
            *("--launch", str(place.models[model]), "--max-new-tokens", "128", *options),
            flags=flags,
        ),
        *_report(place),
    ]


def _locate_fp8(place: Place) -> list[list[str]]:
    lines = []
    for number, length in enumerate(FP8_PROMPTS):
        ids = [(7919 * (number + 1) + 104_729 * at) % 700 + 1 for at in range(length)]
        lines.append(json.dumps({"input_ids": ids}))
    prompts = place.folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    locate = _klbench(
        place,
        "locate",
        *("--launch", str(place.models["dense"]), "--prompts", str(prompts)),
        *("--samples", str(len(FP8_PROMPTS)), "--max-new-tokens", "160"),
        flags=("--kv-cache-dtype", "fp8_e4m3"),
    )
    return [locate, *_report(place)]


def _census(model: str) -> Callable[[Place], list[list[str]]]:
    return lambda place: [
        _klbench(
            place,
            "census",
            *("--launch", str(place.models[model]), "--no-deterministic"),
            *("--samples", "4", "--prompt-tokens", "600"),
        )
    ]


def _selftest(model: str, *families: str) -> Callable[[Place], list[list[str]]]:
    return lambda place: [
        [
            *("python3", "-m", "klbench", "selftest", "--model", model),
            *(argument for family in families for argument in ("--family", family)),
            *("--json", str(place.folder / "selftest.json"), "--sessions", str(place.folder / "sessions")),
        ]
    ]


def _experiment(model: str, names: tuple[str, ...], *flags: str) -> Callable[[Place], list[list[str]]]:
    return lambda place: [
        _klbench(
            place,
            "experiment",
            *names,
            *("--launch", str(place.models[model]), "--helper", "match", "--samples", "16"),
            *("--prompt-tokens", "300", "--max-new-tokens", "64", "--max-relaunches", "4"),
            flags=flags,
        )
    ]


def _probe(model: str, *flags: str) -> Callable[[Place], list[list[str]]]:
    return lambda place: [
        [
            *("python3", "-m", "tests.gpu.probe", str(place.models[model])),
            *("--json", str(place.folder / "probe.json"), "--flags", *place.flags, *flags),
        ]
    ]


_FEW_GRAPHS = ("--cuda-graph-max-bs-decode", "16", "--cuda-graph-max-bs-prefill", "512")
_TRITON = ("--attention-backend", "triton")
_FAMILIES = ("arithmetic", "attention", "state", "head", "pairs")

ROWS: tuple[Row, ...] = (
    Row(
        "dense-page1", 1, ("dense",), "dense, fa3, page 1", _clean("dense"), truth.is_clean, truth.says_clean
    ),
    Row(
        "dense-page64",
        1,
        ("dense",),
        "dense, fa3, page 64",
        _run("dense", "--page-size", "64"),
        truth.run_is_clean,
        truth.says_run,
    ),
    Row("moe-page1", 1, ("moe",), "MoE, fa3, page 1", _clean("moe"), truth.is_clean, truth.says_clean),
    Row(
        "moe-page64",
        1,
        ("moe",),
        "MoE, fa3, page 64",
        _run("moe", "--page-size", "64"),
        truth.run_is_clean,
        truth.says_run,
    ),
    Row(
        "fp8",
        2,
        ("dense",),
        "dense, fa3, K/V in fp8_e4m3",
        _locate_fp8,
        truth_of_origins.tile_edge,
        truth_of_origins.says_located,
    ),
    Row(
        "dense-triton",
        3,
        ("dense",),
        "dense, triton",
        _locate("dense", *_TRITON),
        truth_of_origins.attention_of_layer_0,
        truth_of_origins.says_located,
    ),
    Row(
        "moe-triton",
        3,
        ("moe",),
        "MoE, triton",
        _locate("moe", *_TRITON),
        truth_of_origins.attention_of_layer_0_flips_experts,
        truth_of_origins.says_located,
    ),
    Row(
        "dense-off",
        4,
        ("dense",),
        "dense, flag off: census",
        _census("dense"),
        truth.census_of_dense,
        truth.says_census,
    ),
    Row(
        "dense-off-origin",
        4,
        ("dense",),
        "dense, flag off: origin",
        _locate("dense", options=("--samples", "32", "--prompt-tokens", "600", "--no-deterministic")),
        truth_of_origins.rounding_without_the_flag,
        truth_of_origins.says_located,
    ),
    Row(
        "moe-off",
        4,
        ("moe",),
        "MoE, flag off: census",
        _census("moe"),
        truth.census_of_moe,
        truth.says_census,
    ),
    *(
        Row(
            f"faults-{model}-{half}",
            5,
            (),
            f"planted faults on the {model} demo: {', '.join(families)}",
            _selftest(model, *families),
            truth.all_right if model != "swa" else truth.all_right_beside_the_window_kernel,
            truth.says_selftest,
        )
        for model in ("dense", "moe", "swa", "hybrid")
        for half, families in (("a", ("arithmetic", "attention")), ("b", ("state", "head", "pairs")))
    ),
    Row(
        "swa",
        6,
        ("swa",),
        "sliding window of 256 with its own pool, prompts past it",
        _locate("swa"),
        truth_of_origins.attention_with_a_window,
        truth_of_origins.says_located,
    ),
    Row(
        "hybrid",
        6,
        ("hybrid",),
        "short convolutions (LFM2), chunks of 128, as klbench advises where no prefix is kept",
        _clean("hybrid", flags=("--chunked-prefill-size", "128")),
        truth.is_clean,
        truth.says_clean,
    ),
    Row(
        "linear",
        6,
        ("linear",),
        "gated delta rule (Qwen3-Next), checkpoints every 64 tokens",
        _locate("linear", "--mamba-track-interval", "64"),
        truth_of_origins.delta_rule_of_layer_0,
        truth_of_origins.says_located,
    ),
    Row(
        "tp2",
        7,
        ("dense",),
        "dense, fa3, tp 2",
        _clean("dense", flags=("--tp-size", "2")),
        truth.is_clean,
        truth.says_clean,
        gpus=2,
    ),
    Row(
        "tp2-off",
        7,
        ("dense",),
        "dense, fa3, tp 2, flag off (no deterministic all-reduce)",
        _locate(
            "dense",
            "--tp-size",
            "2",
            options=("--samples", "16", "--prompt-tokens", "600", "--no-deterministic"),
        ),
        truth_of_origins.rounding_without_the_flag_on_two,
        truth_of_origins.says_located,
        gpus=2,
    ),
    Row(
        "toggles",
        8,
        ("dense",),
        "graphs on and off, overlap on and off (triton)",
        _experiment("dense", ("graphs", "overlap"), *_TRITON, *_FEW_GRAPHS),
        truth.toggles_change_nothing,
        truth.says_experiments,
    ),
    Row(
        "probe",
        8,
        ("dense",),
        "state probe with graphs on (triton)",
        _probe("dense", *_TRITON, *_FEW_GRAPHS),
        truth.probe_found,
        truth.says_probe,
    ),
    Row(
        "cost",
        9,
        ("dense",),
        "digests, the stock dumper and sglang's own helpers on one server",
        _clean(
            "dense",
            *("--capture", "match", "--dumper", "--stock", "--samples", "8", "--new-tokens", "32"),
        ),
        truth.cost_is_known,
        truth.says_cost,
        alone=True,
    ),
)

CALLS: tuple[tuple[str, ...], ...] = (
    tuple(row.name for row in ROWS if row.number not in (5, 7, 9)),
    tuple(row.name for row in ROWS if row.number in (5, 7)),
    tuple(row.name for row in ROWS if row.number == 9),
)
"""The whole list in calls of under nine minutes each, on a box with two GPUs and 14 rows at a time."""
