"""The experiments that tell the explanations of a divergence apart: what each asks, costs and concludes.

    plan = make_plan(["repeats", "page_size"], server, helper="match", launch_s=41.0, pass_s=8.0)
    plan.launches, plan.estimate_s                          # 3, 171.0
    outcome = read_toggle("page_size", base, changed, ...)

An experiment makes *passes* of one helper on one or more *configurations* of the server. Invariants: logprobs
are compared bit for bit, token by token, and only between arms of equal batch composition; a setting that was
asked for and is not in force is reported as such and concludes nothing; what cannot be done here says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klbench.core.model_traits import model_traits
from klbench.core.text import counted

PAGE_SIZES = (1, 16, 64)
REPEATS = 5
RELAUNCH_ASKS_S = 60.0
"""A plan whose relaunches take longer than this is agreed to first."""

SAME, DIFFERS, VANISHED, MOVED = "same_bits", "differs", "vanished", "moved"
NOT_POSSIBLE, NO_EFFECT, NOT_COMPARABLE = "not_possible", "no_effect", "not_comparable"
PREDICTED, PARTLY, REFUTED = "predicted", "partly", "refuted"
"""Of an experiment that predicts before it is made."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """`outcomes` says what each would mean, before it is made; `passes` are beside the base."""

    name: str
    title: str
    question: str
    outcomes: Mapping[str, str]
    passes: int = 1
    relaunches: bool = False


CATALOGUE: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "repeats",
            "the same run again",
            "does the server repeat itself, bit for bit?",
            {
                SAME: "no race showed in so many repeats; the divergence is logic or arithmetic",
                DIFFERS: "equal batches gave other bits: a race, uninitialised memory, or a random algorithm",
                NOT_COMPARABLE: "the batches were put together otherwise, so nothing was compared",
            },
            passes=REPEATS,
        ),
        Experiment(
            "alone",
            "one request alone against its batch",
            "does the divergence of a request need the other requests?",
            {
                SAME: "the request diverges alone, with the same bits: its batch has no part in it",
                DIFFERS: "it diverges alone, with other bits: the number of rows has a part, but not all "
                "of it",
                VANISHED: "alone it does not diverge: the number of rows, or its place in the batch, decides",
            },
        ),
        Experiment(
            "equal_m",
            "the same token as decode and as a one-token extend on the same cached prefix",
            "do decode and a one-token extend agree when both have the same rows and the same K/V?",
            {
                SAME: "with equal row counts and the same state both agree: what differs in the run is "
                "arithmetic "
                "that depends on the number of rows",
                DIFFERS: "with equal row counts they still differ, so it is no rounding by the number of "
                "rows: decode and extend do not compute the same function, their kernels split the keys "
                "otherwise, or the prefix that the extend restored is wrong",
            },
        ),
        Experiment(
            "wide_restore",
            "the same restore with a longer prompt behind it",
            "do hits still diverge when the extend behind the restored prefix has many rows?",
            {
                DIFFERS: "a restored prefix diverges also under a wide extend: the restored state is wrong",
                VANISHED: "with many rows behind the same prefix the hits are clean: arithmetic of extends "
                "of few rows, not the restore",
            },
        ),
        Experiment(
            "pad",
            "all prompts padded to a residue, and to another",
            "does the residue decide which requests diverge?",
            {
                PREDICTED: "what diverges follows the residue: something is counted in blocks of that size",
                PARTLY: "the residue has a part in it, or only goes with what decides",
                REFUTED: "the residue does not decide: it went with the requests by accident",
                NOT_COMPARABLE: "no prompt could be padded to these residues",
            },
            passes=2,
        ),
        Experiment(
            "page_size",
            "other page sizes of the K/V cache",
            "does the divergence move with the page grid?",
            {
                SAME: "bit-identical at all page sizes: no fault of pages or restore; a tile of a kernel "
                "stays, too",
                MOVED: "the divergence moves with the page grid: state that is kept by pages is suspected",
                VANISHED: "at another page size nothing diverges: the page grid has a part in it",
            },
            passes=len(PAGE_SIZES) - 1,
            relaunches=True,
        ),
        Experiment(
            "overlap",
            "the overlap scheduler off (or on)",
            "does the scheduler's overlap have a part in it?",
            {
                SAME: "bit-identical: the overlap has no part in it",
                VANISHED: "without the overlap nothing diverges: work of the scheduler reaches a forward "
                "in flight",
                MOVED: "other requests diverge: the overlap has a part in it",
                DIFFERS: "the same requests diverge, with other bits: the new start or the overlap has a "
                "part in their size",
            },
            relaunches=True,
        ),
        Experiment(
            "graphs",
            "CUDA graphs off (or on)",
            "does the replay of CUDA graphs have a part in it?",
            {
                SAME: "bit-identical with and without graphs: capture will see the divergence",
                VANISHED: "graphs decide whether it shows; what lives only with them is seen by no hook: "
                "use the state probe",
                MOVED: "other requests diverge: graphs have a part in it",
            },
            relaunches=True,
        ),
        Experiment(
            "chunk_size",
            "another size of prefill chunks",
            "does the divergence move with the boundaries of prefill chunks?",
            {
                SAME: "bit-identical: chunk boundaries have no part in it",
                MOVED: "it moves with the chunk boundaries",
                VANISHED: "without those boundaries nothing diverges",
            },
            relaunches=True,
        ),
        Experiment(
            "kv_dtype",
            "K/V cache in the model's own dtype",
            "does the quantised K/V cache have a part in it?",
            {
                VANISHED: "with K/V in the model's dtype nothing diverges: the quantised path is not "
                "batch-invariant",
                SAME: "the quantised K/V cache has no part in it",
                MOVED: "the quantised K/V cache has a part, but not all of it",
            },
            relaunches=True,
        ),
        Experiment(
            "tp",
            "another number of tensor-parallel ranks",
            "does the sum over ranks have a part in it?",
            {
                VANISHED: "on one rank nothing diverges: the reduction between ranks depends on the batch",
                MOVED: "other requests diverge: sharded operators or their reduction have a part in it",
                SAME: "bit-identical: the ranks have no part in it",
            },
            relaunches=True,
        ),
        Experiment(
            "checkpoint_strategy",
            "the other strategy for checkpoints of recurrent state",
            "does keeping conv and SSM state in the cache have a part in it?",
            {
                VANISHED: "with the other strategy nothing diverges: checkpoints are written or restored "
                "wrongly",
                MOVED: "the divergence moves with the checkpoints",
                SAME: "bit-identical: the checkpoint strategy has no part in it",
            },
            relaunches=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """How the server is started for some passes: `flags` beside its own, () for the original one. `expect` is
    what the server must say of itself, {field of the `server` object: value}."""

    flags: tuple[str, ...] = ()
    expect: Mapping[str, Any] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    """Options of the user's own arguments that would contradict the flags."""
    label: str = ""
    """What it is called, where its flags do not say it."""

    @property
    def name(self) -> str:
        return (
            self.label
            or " ".join(self.flags)
            or ("without " + " ".join(self.remove) if self.remove else "as it is")
        )


AS_IT_IS = Configuration()
_GRAPHS_OFF = "--disable-cuda-graph"
GRAPHS_ON = Configuration(
    (),
    {"cuda_graphs": True},
    (
        _GRAPHS_OFF,
        "--disable-prefill-cuda-graph",
        "--disable-decode-cuda-graph",
        "--disable-piecewise-cuda-graph",
        "--cuda-graph-backend-prefill",
        "--cuda-graph-backend-decode",
    ),
    label="CUDA graphs on",
)
"""CUDA graphs as sglang has them by itself: no flag that switches a kind of them off."""


def configured_arguments(arguments: Sequence[str], configuration: Configuration) -> tuple[str, ...]:
    """The user's sglang arguments as this configuration wants them."""
    kept: list[str] = []
    keep = True
    for argument in arguments:
        if argument.startswith("--"):
            keep = argument.partition("=")[0] not in configuration.remove
        if keep:
            kept.append(argument)
    return (*kept, *configuration.flags)


@dataclass(frozen=True, slots=True)
class Step:
    """The passes of one experiment under one configuration."""

    experiment: str
    configuration: Configuration
    passes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order in which they are made, grouped by configuration. `impossible`: name -> reason."""

    steps: tuple[Step, ...]
    impossible: Mapping[str, str]
    launches: int
    """Starts of a server beyond the one that runs."""
    estimate_s: float | None
    """None where a launch or a pass was never measured."""
    predictions: Mapping[str, str] = field(default_factory=dict)
    """What an experiment that predicts expects to see: name -> prediction."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": [
                {
                    "experiment": step.experiment,
                    "configuration": step.configuration.name,
                    "passes": step.passes,
                }
                for step in self.steps
            ],
            "impossible": dict(self.impossible),
            "predictions": dict(self.predictions),
            "launches": self.launches,
            "estimate_s": self.estimate_s,
        }


def base_name(name: str) -> str:
    """The experiment of a name with a parameter: `pad` of `pad:cached_tokens%8=3`."""
    return name.partition(":")[0]


def why_not(name: str, server: Mapping[str, Any], helper: str | None = None) -> str | None:
    """Why the experiment cannot be made on this server, or None."""
    if name in ("equal_m", "wide_restore") and server.get("radix_cache") is False:
        return "the radix cache is off: there is no cached prefix to extend"
    if name == "equal_m" and (server.get("page_size") or 1) > 1:
        page = server["page_size"]
        return (
            f"with pages of {page} tokens a one-token extend exists only at lengths = 1 mod {page}; "
            "it is made at page size 1"
        )
    if name == "wide_restore" and helper == "match":
        return "requests of match restore nothing"
    if name == "page_size" and server.get("radix_cache") is False and helper != "match":
        return "the radix cache is off: nothing is restored by pages"
    if name == "graphs" and server.get("device") == "cpu":
        return "a CPU server replays no CUDA graphs: there is nothing to switch"
    if name == "tp" and server.get("device") == "cpu" and (server.get("tp_size") or 1) == 1:
        return "this CPU server has one rank: no sum over ranks has a part in it"
    if (reason := _state_forbids(name, server)) is not None:
        return reason
    if name == "kv_dtype" and not quantised_kv(server):
        return "the K/V cache is not quantised"
    if name == "overlap" and server.get("overlap") is None:
        return "the server does not say whether its scheduler overlaps"
    return None


def _state_forbids(name: str, server: Mapping[str, Any]) -> str | None:
    """Why a recurrent model's state, or its absence, rules the experiment out (sglang's mamba_hook.py)."""
    state, strategy = model_traits(server).state, server.get("mamba_radix_cache_strategy")
    if strategy == "auto":
        # What it resolved to is not said; a CPU takes no snapshots.
        strategy = "no_buffer" if server.get("device") == "cpu" else None
    if name == "checkpoint_strategy":
        if not state:
            return "the model has no conv or SSM state to keep in checkpoints"
        if server.get("device") == "cpu":
            return "sglang takes snapshots of conv and SSM state (extra_buffer) on accelerators only"
        if strategy is None:
            return "the server does not say which strategy it uses"
        if (page := server.get("page_size") or 1) > 1 and _has_snapshots(strategy):
            return f"without snapshots (no_buffer) the page size must be 1, and it is {page}"
        return None
    if not state or server.get("radix_cache") is False or strategy is None or _has_snapshots(strategy):
        return None
    if name == "page_size":
        return "without snapshots (no_buffer) conv and SSM state is kept at page size 1 only"
    if name == "overlap" and server.get("overlap") is False:
        return "without snapshots (no_buffer) conv and SSM state is kept without the overlap scheduler only"
    return None


def _has_snapshots(strategy: object) -> bool:
    return str(strategy).startswith("extra_buffer")


def quantised_kv(server: Mapping[str, Any]) -> bool:
    return any(word in str(server.get("kv_cache_dtype") or "") for word in ("fp8", "float8", "fp4", "int8"))


def configurations(name: str, server: Mapping[str, Any]) -> tuple[Configuration, ...]:
    """The configurations, beside the server as it is, in which the experiment makes its passes."""
    match name:
        case "page_size":
            present = server.get("page_size") or 1
            sizes = [size for size in PAGE_SIZES if size != present][: CATALOGUE[name].passes]
            return tuple(
                Configuration(("--page-size", str(size)), {"page_size": size}, ("--page-size",))
                for size in sizes
            )
        case "overlap":
            flag = "--disable-overlap-schedule"
            if server.get("overlap"):
                return (Configuration((flag,), {"overlap": False}),)
            return (Configuration((), {"overlap": True}, (flag,)),)
        case "graphs":
            if server.get("cuda_graphs"):
                backends = ("--cuda-graph-backend-prefill", "--cuda-graph-backend-decode")
                return (Configuration((_GRAPHS_OFF,), {"cuda_graphs": False}, backends),)
            return (GRAPHS_ON,)
        case "chunk_size":
            size = 128 if (server.get("chunked_prefill_size") or 0) != 128 else 512
            flag = "--chunked-prefill-size"
            return (Configuration((flag, str(size)), {"chunked_prefill_size": size}, (flag,)),)
        case "kv_dtype":
            flags = ("--kv-cache-dtype", "auto")
            return (Configuration(flags, {"quantised_kv": False}, ("--kv-cache-dtype",)),)
        case "tp":
            size = 1 if (server.get("tp_size") or 1) > 1 else 2
            flags = ("--tp-size", str(size))
            return (Configuration(flags, {"tp_size": size}, ("--tp", "--tp-size", "--tensor-parallel-size")),)
        case "checkpoint_strategy":
            snapshots = _has_snapshots(server.get("mamba_radix_cache_strategy"))
            other, flag = "no_buffer" if snapshots else "extra_buffer", "--mamba-radix-cache-strategy"
            # sglang refuses no_buffer with the overlap scheduler.
            flags = (flag, other, *(("--disable-overlap-schedule",) if snapshots else ()))
            return (Configuration(flags, {"mamba_radix_cache_strategy": other}, (flag,)),)
    return ()


def make_plan(
    names: Sequence[str],
    server: Mapping[str, Any],
    *,
    helper: str | None = None,
    launch_s: float | None = None,
    pass_s: float | None = None,
    ruled_out: Mapping[str, str] | None = None,
) -> Plan:
    """The passes for some experiments, so that each configuration is started once.

    What the server as it is can do comes first; the original configuration is not started again afterwards.
    `ruled_out` are experiments that are impossible for a reason that the server's facts do not tell.
    """
    impossible = {name: reason for name in names if (reason := why_not(name, server, helper)) is not None}
    impossible |= {name: reason for name, reason in (ruled_out or {}).items() if name not in impossible}
    steps: list[Step] = []
    grouped: dict[str, list[Step]] = {}
    for name in names:
        if name in impossible:
            continue
        experiment = CATALOGUE[name]
        if not experiment.relaunches:
            steps.append(Step(name, AS_IT_IS, experiment.passes))
            continue
        for configuration in configurations(name, server):
            grouped.setdefault(configuration.name, []).append(Step(name, configuration, 1))
    ordered = [*steps, *(step for group in grouped.values() for step in group)]
    passes = sum(step.passes for step in ordered)
    estimate = None
    if pass_s is not None and (launch_s is not None or not grouped):
        estimate = passes * pass_s + len(grouped) * (launch_s or 0.0)
    return Plan(tuple(ordered), impossible, len(grouped), estimate)


def cost(name: str, server: Mapping[str, Any]) -> dict[str, int]:
    """What the experiment takes: starts of a server and runs of the helper."""
    plan = make_plan([name], server)
    return {"launches": plan.launches, "passes": sum(step.passes for step in plan.steps)}


def cost_words(costs: Mapping[str, int]) -> str:
    """That in words."""
    launches, passes = costs["launches"], costs["passes"]
    runs = f"{counted(passes, 'run')} of the helper"
    if not launches:
        return f"{runs}, no relaunch"
    return f"{runs}, {launches} {'relaunch' if launches == 1 else 'relaunches'}"
