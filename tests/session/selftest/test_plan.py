"""What a selftest plans: enough, in an order that bears an interruption, and nothing that there is not."""

import pytest

from klbench.errors import UsageError
from klbench.insitu.faults_catalogue import CATALOGUE, PAIR_CATALOGUE, parse_faults
from klbench.session.selftest.plan import (
    AS_IT_IS,
    FOUR,
    MIXED,
    PAGED,
    QUICK,
    RETRACTING,
    SHARED,
    VARIATIONS,
    VARIED_WORKLOADS,
    Asked,
    counter_fault,
    family_of,
    make_plan,
    size,
)


def test_the_full_selftest_has_every_fault_that_fits_on_every_model() -> None:
    stations = make_plan(Asked("full"))
    for model in ("dense", "moe", "swa", "hybrid"):
        planted = {case.name for station in stations if station.model == model for case in station.cases}
        fitting = {name for name, fault in CATALOGUE.items() if model in fault.truth.models}
        fitting |= {name for name, pair in PAIR_CATALOGUE.items() if model in pair.models}
        assert fitting <= planted


def test_a_fault_is_planned_where_it_can_fire() -> None:
    for station in make_plan(Asked("full")):
        for case in station.cases:
            needs = {need for planted in parse_faults(case.fault) for need in planted.fault.truth.needs}
            assert ("chunks" in needs) <= ("--chunked-prefill-size" in station.configuration.flags)
            assert ("retraction" in needs) == (station.configuration is RETRACTING)
            assert ("others" in needs) <= (case.workload.batch > 1)


def test_the_full_selftest_has_at_least_thirty_clean_configurations() -> None:
    stations = make_plan(Asked("full"))
    clean = {(s.model, s.configuration.name, w.name) for s in stations for w in s.clean}
    assert len(clean) >= 30
    assert len({station.configuration.flags for station in stations}) >= 5


def test_the_ordinary_configuration_comes_before_the_varied_ones() -> None:
    names = [station.configuration.name for station in make_plan(Asked("full"))]
    ordinary = [place for place, name in enumerate(names) if name == AS_IT_IS.name]
    assert max(ordinary) < min(place for place in range(len(names)) if place not in ordinary)


def test_at_least_forty_faults_are_planted_on_at_least_three_models() -> None:
    ordinary = [station for station in make_plan(Asked("full")) if station.configuration is AS_IT_IS]
    planted = {
        model: {case.name for station in ordinary if station.model == model for case in station.cases}
        for model in ("dense", "moe", "swa", "hybrid")
    }
    assert len({name for names in planted.values() for name in names}) >= 40
    # Of the others' places there is none in a model of another kind.
    assert all(len(names) >= 25 for names in planted.values())


def test_a_variation_names_faults_that_there_are_and_plants_each_of_them() -> None:
    stations = make_plan(Asked("full"))
    for configuration, workload, names in (
        *((AS_IT_IS, workload, names) for workload, names in VARIED_WORKLOADS.items()),
        *((variation.configuration, FOUR, variation.faults) for variation in VARIATIONS),
    ):
        assert {*names} <= {*CATALOGUE, *PAIR_CATALOGUE}
        planted = {
            case.name
            for station in stations
            if station.configuration is configuration
            for case in station.cases
            if case.workload is workload
        }
        if workload is not FOUR or configuration is not AS_IT_IS:
            assert planted == {*names}, (configuration.name, workload.name)


def test_no_server_is_planned_that_cannot_start() -> None:
    for station in make_plan(Asked("full")):
        assert station.model in PAGED or "--page-size" not in station.configuration.flags


def test_faults_are_varied_in_each_way_on_at_least_three_models() -> None:
    tried: dict[tuple[str, str], set[str]] = {}
    for station in make_plan(Asked("full")):
        for case in station.cases:
            tried.setdefault((station.configuration.name, case.workload.name), set()).add(station.model)
    assert len(tried) == 8
    assert all(len(models) >= 3 for models in tried.values())


def test_no_result_is_planned_twice() -> None:
    for extent in ("quick", "full"):
        stations = make_plan(Asked(extent))
        keys = [
            (station.model, station.configuration.name, case.workload.name, case.fault)
            for station in stations
            for case in station.cases
        ]
        assert len(keys) == len(set(keys))
        assert size(stations) == len(keys) + sum(len(station.clean) for station in stations)


def test_the_quick_selftest_has_all_families_clean_servers_and_a_fault_that_cannot_fire() -> None:
    (station,) = make_plan(Asked())
    assert {case.family for case in station.cases} == {"arithmetic", "attention", "state", "head", "pairs"}
    assert len(station.clean) >= 3
    assert [case.fault for case in station.cases if case.cannot_fire] == ["o_proj-rows:rows=1000000"]
    assert {*QUICK} <= {*CATALOGUE, *PAIR_CATALOGUE}


@pytest.mark.parametrize("model", ["dense", "moe", "swa", "hybrid"])
def test_each_model_has_a_fault_that_cannot_fire_and_has_its_place(model: str) -> None:
    (planted,) = parse_faults(counter_fault(model))
    assert model in planted.fault.truth.models
    assert planted.parameters["rows"] == 1_000_000


def test_named_faults_and_families_are_done_alone() -> None:
    (station,) = make_plan(Asked(faults=("key-write:step=6", "restore-key")))
    assert [case.fault for case in station.cases] == ["key-write:step=6", "restore-key"]
    assert station.clean == ()
    (station,) = make_plan(Asked(families=("head",)))
    assert {case.name for case in station.cases} == {"lm_head-rows", "log-of-softmax"}
    (station,) = make_plan(Asked(families=("attention",)))
    assert "attention-split" in {case.name for case in station.cases}
    stations = make_plan(Asked("full", models=("swa",), faults=("window-short",)))
    assert {station.model for station in stations} == {"swa"}
    assert all(case.name == "window-short" for station in stations for case in station.cases)


def test_a_named_fault_is_varied_where_that_could_make_a_difference() -> None:
    stations = make_plan(Asked("full", models=("dense",), faults=("late-norm:after=4",)))
    assert [(s.configuration.name, [(case.fault, case.workload) for case in s.cases]) for s in stations] == [
        ("as it is", [("late-norm:after=4", FOUR)]),
        ("no overlap", [("late-norm:after=4", FOUR)]),
    ]


def test_a_named_fault_gets_the_server_that_it_needs() -> None:
    stations = make_plan(Asked(faults=("key-write", "chunk-key", "stale-retraction")))
    assert [(s.configuration.name, [case.name for case in s.cases]) for s in stations] == [
        ("as it is", ["key-write"]),
        ("chunks of 128", ["chunk-key"]),
        ("retraction", ["stale-retraction"]),
    ]


def test_a_fault_that_spares_a_request_is_not_planned_for_one_request_alone() -> None:
    alone = [
        case.name
        for station in make_plan(Asked("full", faults=("restore-not-first",)))
        for case in station.cases
        if case.workload.batch == 1
    ]
    assert alone == []


@pytest.mark.parametrize(
    "asked",
    [
        Asked(models=("huge",)),
        Asked(families=("weather",)),
        Asked(faults=("no-such-fault",)),
        Asked(faults=("key-write:no=1",)),
        Asked(models=("dense",), faults=("router-rows",)),
    ],
)
def test_what_there_is_not_is_refused(asked: Asked) -> None:
    with pytest.raises(UsageError):
        make_plan(asked)


def test_arguments_of_the_user_go_to_every_server() -> None:
    stations = make_plan(Asked("full", arguments=("--attention-backend", "triton")))
    assert all(station.configuration.flags[-2:] == ("--attention-backend", "triton") for station in stations)


def test_workloads_are_what_they_say() -> None:
    assert [len(prompt) for prompt in MIXED.prompts()] == list(MIXED.lengths)
    prompts = SHARED.prompts()
    assert len({tuple(prompt[: SHARED.shared]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == SHARED.batch
    assert prompts == SHARED.prompts()


def test_every_fault_has_a_family() -> None:
    names = [*CATALOGUE, *PAIR_CATALOGUE]
    assert [name for name in names if family_of(name) == "other"] == []
    assert family_of("key-write:step=5") == "state"
    assert family_of("key-write+o_proj-rows") == "pairs"
