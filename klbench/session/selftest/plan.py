"""What a selftest does: faults on models, in server configurations and workloads; and clean configurations.

Every fault is planted on every model that has its place, with four prompts on an ordinary server. Another
batch, page, chunk or schedule is tried with those faults for which it could make a difference.

Invariants: one server is started for each station; the ordinary configuration comes first, so that an
interrupted selftest has judged every fault on every model before it varies batches and servers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

from klbench.engine.demo_faults import NEEDED
from klbench.errors import UsageError
from klbench.insitu import faults_entries
from klbench.insitu.faults_catalogue import CATALOGUE, PAIR_CATALOGUE, ArmedFault, parse_faults
from klbench.zoo import KINDS, plain_token_ids, seeded_prompts

Extent = Literal["quick", "full"]

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "arithmetic": tuple(fault.name for fault in faults_entries.ARITHMETIC),
    "attention": tuple(fault.name for fault in faults_entries.ATTENTION),
    "state": tuple(fault.name for fault in faults_entries.STATE),
    "head": tuple(fault.name for fault in faults_entries.HEAD),
    "pairs": tuple(PAIR_CATALOGUE),
}
"""The catalogue's families and the names in them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts that a case sees: `lengths` where they are given one by one, else around `tokens`."""

    name: str
    batch: int
    tokens: int = 160
    shared: int = 0
    """So many tokens at the beginning of all prompts are the same."""
    lengths: tuple[int, ...] = ()

    def prompts(self) -> list[list[int]]:
        """Seeded token ids."""
        longest = max(self.lengths, default=self.tokens)
        prompts = seeded_prompts(self.batch, longest * (2 if self.lengths else 1), 7, plain_token_ids())
        if self.lengths:
            prompts = [prompt[:length] for prompt, length in zip(prompts, self.lengths, strict=True)]
        common = prompts[0][: self.shared]
        return [common + prompt[len(common) :] for prompt in prompts]


FOUR = Workload("4 prompts", 4)
ONE = Workload("1 prompt", 1)
SIXTEEN = Workload("16 prompts", 16)
SHARED = Workload("common prefix", 6, shared=64)
MIXED = Workload("mixed lengths", 10, lengths=(3, 17, 64, 65, 100, 127, 128, 129, 250, 400))
LONG = Workload("long prompts", 3, tokens=700)


@dataclass(frozen=True, slots=True)
class ServerConfiguration:
    """How a server is started beside the demo's own flags."""

    name: str
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


AS_IT_IS = ServerConfiguration("as it is")
CHUNKED = ServerConfiguration("chunks of 128", NEEDED["chunks"].arguments)
RETRACTING = ServerConfiguration("retraction", *astuple(NEEDED["retraction"]))


@dataclass(frozen=True, slots=True)
class Case:
    """One fault, spelled as in the catalogue, under one workload."""

    fault: str
    name: str
    """Its name without parameters."""
    family: str
    workload: Workload
    cannot_fire: bool = False
    """It is armed to see that a fault which cannot fire here is never taken for a pass."""


@dataclass(frozen=True, slots=True)
class Station:
    """One server and what is done on it."""

    model: str
    configuration: ServerConfiguration
    cases: tuple[Case, ...] = ()
    clean: tuple[Workload, ...] = ()

    @property
    def everything(self) -> tuple[Case | Workload, ...]:
        """What is done on it, in order: clean first, for a server that accuses itself judges no fault."""
        return (*self.clean, *self.cases)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for; empty means all."""

    extent: Extent = "quick"
    models: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """sglang's own, for every server."""
    new_tokens: int = 24

    @property
    def chooses(self) -> bool:
        """Whether single faults or families are named."""
        return bool(self.families or self.faults)


QUICK = (
    *("o_proj-rows", "residual-gap", "attention-blocks", "decode-window", "restore-key", "key-write"),
    *("key-overwrite", "log-of-softmax", "pair-outside"),
)
"""A few of each family, for every change."""

VARIED_WORKLOADS: Mapping[Workload, tuple[str, ...]] = {
    # One row a decode step: nothing is shared, and only extends have rows beside each other.
    ONE: (
        *("o_proj-rows", "router-rows", "conv_in-rows", "padding-scale", "attention-blocks"),
        *("decode-window", "restore-key", "key-write", "conv-zeroed"),
    ),
    # Rows, places in the batch and residues of other requests.
    SIXTEEN: (
        *("o_proj-rows", "batch-scale", "conv-rows", "attention-prompt", "restore-residue"),
        *("restore-not-first", "slot-reuse", "conv-other", "conv-slot-reuse", "pair-inside"),
    ),
    # Positions, windows, blocks and intervals lie elsewhere in each request.
    MIXED: (
        *("attention-blocks", "decode-window", "interval-write", "restore-key", "key-overwrite"),
        *("window-short", "window-evict", "conv-depth"),
    ),
}
"""Faults that other prompts could move, by workload, on an ordinary server."""


@dataclass(frozen=True, slots=True)
class Variation:
    """Another server, the faults for which it could make a difference, and what must be clean on it."""

    configuration: ServerConfiguration
    faults: tuple[str, ...] = ()
    clean: tuple[Workload, ...] = ()
    models: tuple[str, ...] = tuple(KINDS)


PAGED = ("dense", "moe", "swa")
"""On the CPU sglang keeps recurrent state without a buffer, and then serves pages of one token only."""

VARIATIONS = (
    Variation(
        # Prefixes are restored in pages, and their lengths are no longer odd.
        ServerConfiguration("page 16", ("--page-size", "16")),
        (
            *("residual-gap", "attention-prompt", "suffix-position", "restore-key", "restore-page"),
            *("key-overwrite", "slot-reuse"),
        ),
        (SHARED, MIXED),
        PAGED,
    ),
    Variation(
        # A prompt's rows are computed in several calls.
        CHUNKED,
        (
            *("o_proj-rows", "batch-scale", "attention-split", "attention-prompt", "lm_head-rows"),
            *("restore-key", "chunk-key", "conv-gap", "conv-zeroed", "conv-chunk", "conv-checkpoint"),
        ),
        (SHARED, LONG),
    ),
    Variation(
        # The next batch is made up before or after the last one has ended.
        ServerConfiguration("no overlap", ("--disable-overlap-schedule",)),
        ("late-norm", "decode-window", "key-write", "slot-reuse", "log-of-softmax", "conv-slot-reuse"),
        (SIXTEEN,),
    ),
    Variation(RETRACTING, ("stale-retraction",), (FOUR,)),
    Variation(
        ServerConfiguration(
            "page 64, chunks of 64",
            ("--page-size", "64", "--chunked-prefill-size", "64", "--max-prefill-tokens", "512"),
        ),
        clean=(MIXED, LONG),
        models=("dense", "moe"),
    ),
    Variation(
        ServerConfiguration("small batches", ("--max-running-requests", "3", "--disable-overlap-schedule")),
        clean=(SIXTEEN, MIXED),
        models=("moe", "swa"),
    ),
)

_NEVER = "rows=1000000"
"""A fault of calls of so many rows cannot fire here."""


def make_plan(asked: Asked) -> list[Station]:
    """The stations in order. Raises UsageError for a model, family or fault that there is not."""
    _check(asked)
    if asked.extent == "quick":
        stations = [station for model in asked.models or ("dense",) for station in _quick(asked, model)]
    else:
        stations = _full(asked, asked.models or tuple(KINDS))
    if asked.arguments:
        stations = [_with_arguments(station, asked.arguments) for station in stations]
    found = [station for station in stations if station.cases or station.clean]
    if not found:
        raise UsageError(
            "there is nothing to do",
            why="no chosen fault fits a chosen model",
            next="klbench demo --list-faults",
        )
    return found


def _quick(asked: Asked, model: str) -> list[Station]:
    """One server; another one only for faults that are named and cannot fire on it."""
    chosen = _chosen(asked, model, among=None if asked.chooses else QUICK)
    cases = _cases(chosen, FOUR, asked)
    stations = [
        Station(model, AS_IT_IS, _with_counter_case(cases, model, asked), _clean(asked, ONE, SHARED, MIXED))
    ]
    for configuration in (CHUNKED, RETRACTING):
        named = [fault for fault in chosen if not _can_fire(fault, FOUR, AS_IT_IS)]
        stations.append(Station(model, configuration, _cases(named, FOUR, asked, configuration)))
    return stations


def _full(asked: Asked, models: Sequence[str]) -> list[Station]:
    stations = []
    for model in models:
        cases = _with_counter_case(_cases(_chosen(asked, model), FOUR, asked), model, asked)
        clean = _clean(asked, ONE, FOUR, SIXTEEN, SHARED, MIXED, LONG)
        stations.append(Station(model, AS_IT_IS, cases, clean))
    for model in models:
        varied = [
            case
            for workload, names in VARIED_WORKLOADS.items()
            for case in _cases(_chosen(asked, model, among=names), workload, asked)
        ]
        stations.append(Station(model, AS_IT_IS, tuple(varied)))
    for variation in VARIATIONS:
        for model in [model for model in models if model in variation.models]:
            names = _chosen(asked, model, among=variation.faults)
            cases = _cases(names, FOUR, asked, variation.configuration)
            stations.append(Station(model, variation.configuration, cases, _clean(asked, *variation.clean)))
    return stations


def _can_fire(fault: str, workload: Workload, configuration: ServerConfiguration) -> bool:
    """Whether server and prompts have what the fault needs beside its model (faults_truth.NEEDS)."""
    return all(
        _meets(need, planted, workload, configuration)
        for planted in parse_faults(fault)
        for need in planted.fault.truth.needs
    )


def _meets(need: str, planted: ArmedFault, workload: Workload, configuration: ServerConfiguration) -> bool:
    match need:
        case "chunks":
            return "--chunked-prefill-size" in configuration.flags
        case "retraction":
            return configuration is RETRACTING
        case "others":
            return workload.batch > 1
        case "padding":
            return workload.batch % planted.parameters["pad"] != 0
    # Hits and windows: the helpers and the workloads' lengths see to it.
    return True


def _clean(asked: Asked, *workloads: Workload) -> tuple[Workload, ...]:
    """Clean configurations belong to a whole selftest, not to one of chosen faults."""
    return () if asked.chooses else workloads


def size(stations: Sequence[Station]) -> int:
    """How many cases and clean configurations there are."""
    return sum(len(station.cases) + len(station.clean) for station in stations)


def _check(asked: Asked) -> None:
    _known("model", asked.models, KINDS)
    _known("family", asked.families, FAMILIES)
    for fault in asked.faults:
        try:
            parse_faults(fault)
        except ValueError as error:
            raise UsageError(str(error), next="klbench demo --list-faults") from error


def _known(what: str, given: Sequence[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r}", why=f"there are: {', '.join(known)}")


def _chosen(asked: Asked, model: str, *, among: Sequence[str] | None = None) -> list[str]:
    """The faults that are asked for and fit the model; of these only those named `among` these."""
    names = list(asked.faults) or [*CATALOGUE, *PAIR_CATALOGUE]
    if asked.families:
        names = [name for name in names if family_of(name) in asked.families]
    if among is not None:
        names = [name for name in names if name.partition(":")[0] in among]
    return [name for name in names if _fits(name, model)]


def _fits(fault: str, model: str) -> bool:
    if fault in PAIR_CATALOGUE:
        return model in PAIR_CATALOGUE[fault].models
    return all(model in armed.fault.truth.models for armed in parse_faults(fault))


def family_of(fault: str) -> str:
    """The family of a fault, by its name or its spelling."""
    name = fault.partition(":")[0]
    if "+" in fault:
        return "pairs"
    return next((family for family, names in FAMILIES.items() if name in names), "other")


def _cases(
    faults: Sequence[str],
    workload: Workload,
    asked: Asked,
    configuration: ServerConfiguration = AS_IT_IS,
) -> tuple[Case, ...]:
    return tuple(
        Case(_fitted(fault, asked.new_tokens), fault.partition(":")[0], family_of(fault), workload)
        for fault in faults
        if workload.batch > _needs_more_than(fault) and _can_fire(fault, workload, configuration)
    )


def _fitted(fault: str, new_tokens: int) -> str:
    """A fault of default parameters with those that fit the selftest's short generations."""
    return {
        "decode-window": "decode-window:after=4",
        "attention-prompt": f"attention-prompt:tile={2 * new_tokens}",
    }.get(fault, fault)


def _needs_more_than(fault: str) -> int:
    """So many requests of a batch are spared by the fault: a smaller batch cannot show it."""
    return {"restore-not-first": 1, "restore-residue": 1}.get(fault.partition(":")[0], 0)


def counter_fault(model: str) -> str:
    """A fault that fits the model and cannot fire."""
    name = next(
        name
        for name, fault in CATALOGUE.items()
        if "rows" in fault.parameters and model in fault.truth.models
    )
    return f"{name}:{_NEVER}"


def _with_counter_case(cases: tuple[Case, ...], model: str, asked: Asked) -> tuple[Case, ...]:
    if asked.chooses:
        return cases
    fault = counter_fault(model)
    name = fault.partition(":")[0]
    return (*cases, Case(fault, name, family_of(fault), FOUR, cannot_fire=True))


def _with_arguments(station: Station, arguments: tuple[str, ...]) -> Station:
    before = station.configuration
    return replace(station, configuration=replace(before, flags=(*before.flags, *arguments)))
