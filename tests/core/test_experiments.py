"""What can be tried on a server, and why something cannot: every experiment is possible or says why not."""

from __future__ import annotations

from typing import Any

import pytest

from klbench.core.experiments import (
    CATALOGUE,
    base_name,
    configurations,
    configured_arguments,
    make_plan,
    why_not,
)

CPU: dict[str, Any] = {
    "device": "cpu", "radix_cache": True, "page_size": 1, "overlap": True, "cuda_graphs": False, "tp_size": 1,
    "kv_cache_dtype": "auto", "chunked_prefill_size": 4096, "architectures": ["Qwen3ForCausalLM"],
    "mamba_radix_cache_strategy": "auto",
}  # fmt: skip
HYBRID_CPU = CPU | {
    "architectures": ["Lfm2ForCausalLM"], "overlap": False, "mamba_radix_cache_strategy": "no_buffer",
}  # fmt: skip
GPU = CPU | {"device": "cuda", "cuda_graphs": True}
HYBRID_GPU = GPU | {"architectures": ["Lfm2ForCausalLM"], "mamba_radix_cache_strategy": "extra_buffer"}


@pytest.mark.parametrize("server", [CPU, HYBRID_CPU, GPU, HYBRID_GPU])
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_experiment_is_in_the_plan_or_says_why_not(name: str, server: dict[str, Any]) -> None:
    plan = make_plan([name], server, helper="prefill_cache_hit", launch_s=20.0, pass_s=2.0)
    if name in plan.impossible:
        assert len(plan.impossible[name]) > 20
        assert not plan.steps
        return
    assert sum(step.passes for step in plan.steps) >= 1
    assert plan.launches == len(configurations(name, server))
    assert plan.estimate_s is not None


@pytest.mark.parametrize(
    ("name", "server", "reason"),
    [
        ("graphs", CPU, "replays no CUDA graphs"),
        ("tp", CPU, "no sum over ranks has a part in it"),
        ("kv_dtype", CPU, "not quantised"),
        ("checkpoint_strategy", CPU, "no conv or SSM state"),
        ("checkpoint_strategy", HYBRID_CPU, "on accelerators only"),
        ("page_size", HYBRID_CPU, "page size 1 only"),
        ("overlap", HYBRID_CPU, "without the overlap scheduler only"),
        ("checkpoint_strategy", HYBRID_GPU | {"page_size": 16}, "the page size must be 1"),
        ("checkpoint_strategy", HYBRID_GPU | {"mamba_radix_cache_strategy": "auto"}, "does not say which"),
        ("page_size", HYBRID_CPU | {"mamba_radix_cache_strategy": "auto"}, "page size 1 only"),
        ("equal_m", GPU | {"page_size": 16}, "made at page size 1"),
        ("wide_restore", GPU | {"radix_cache": False}, "radix cache is off"),
    ],
)
def test_what_is_not_possible_here_names_the_reason(name: str, server: dict[str, Any], reason: str) -> None:
    assert reason in str(why_not(name, server, "prefill_cache_hit"))


def test_a_cpu_server_of_two_ranks_can_be_started_with_one() -> None:
    server = CPU | {"tp_size": 2}
    assert why_not("tp", server) is None
    (alone,) = configurations("tp", server)
    assert alone.expect == {"tp_size": 1}


def test_nothing_is_ruled_out_by_a_strategy_that_is_not_known() -> None:
    unknown = HYBRID_GPU | {"mamba_radix_cache_strategy": "auto"}
    assert why_not("page_size", unknown) is None
    assert why_not("overlap", unknown | {"overlap": False}) is None


def test_a_state_without_snapshots_is_tried_without_the_overlap_scheduler() -> None:
    (found,) = configurations("checkpoint_strategy", HYBRID_GPU)
    assert found.flags == ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")


def test_experiments_of_one_configuration_start_it_once() -> None:
    alone = make_plan(["overlap"], GPU, launch_s=30.0, pass_s=1.0)
    both = make_plan(["overlap", "repeats", "graphs"], GPU, launch_s=30.0, pass_s=1.0)
    assert alone.launches == 1
    assert both.launches == 2
    assert both.steps[0].experiment == "repeats"


def test_what_the_facts_do_not_tell_can_be_ruled_out() -> None:
    plan = make_plan(["pad", "repeats"], CPU, ruled_out={"pad": "no residue is striking"})
    assert plan.impossible == {"pad": "no residue is striking"}
    assert {step.experiment for step in plan.steps} == {"repeats"}
    assert base_name("pad:cached_tokens%8=3") == "pad"


def test_graphs_are_switched_against_the_users_own_flags() -> None:
    users = (
        *("--disable-cuda-graph", "--tp-size", "2"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill=disabled"),
    )
    (on,) = configurations("graphs", GPU | {"cuda_graphs": False})
    assert configured_arguments(users, on) == ("--tp-size", "2")
    assert (on.name, on.expect) == ("CUDA graphs on", {"cuda_graphs": True})
    (off,) = configurations("graphs", GPU)
    chosen = ("--cuda-graph-backend-decode", "full", "--tp-size", "2")
    assert configured_arguments(chosen, off) == ("--tp-size", "2", "--disable-cuda-graph")
