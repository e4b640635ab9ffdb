"""Each fault of the catalogue can be demonstrated: the demo has what it needs, or says what is missing."""

from pathlib import Path

import pytest

from klbench.defaults import DEMO_MAX_NEW_TOKENS, DEMO_PROMPT_TOKENS
from klbench.engine import target as module
from klbench.engine.demo_faults import (
    check_can_fire,
    checked_faults,
    faults_of,
    fitting_samples,
    needed_by,
)
from klbench.engine.facts import parse_arguments
from klbench.engine.target import Demo, LaunchOptions, plan_launch
from klbench.errors import UsageError
from klbench.insitu.faults_catalogue import CATALOGUE, PAIR_CATALOGUE, parse_faults
from klbench.insitu.faults_truth import ALL_MODELS, NEEDS

SAMPLES = 32
EVERYTHING = (*CATALOGUE, *PAIR_CATALOGUE)
BY_PROMPTS = {"hits", "others", "window", "padding"}
"""Needs that the helpers and the demo's prompts meet, the others are met by the server's start."""


@pytest.mark.parametrize("fault", EVERYTHING)
def test_every_fault_fits_a_demo_model_and_fires_with_the_demos_own_defaults(fault: str) -> None:
    models = [model for model in ALL_MODELS if fault in faults_of(model)]  # type: ignore[arg-type]
    assert models
    for model in models:
        faults = checked_faults(fault, model)  # type: ignore[arg-type]
        samples = fitting_samples(faults, SAMPLES)
        assert SAMPLES - 1 <= samples <= SAMPLES
        check_can_fire(faults, samples=samples, new_tokens=DEMO_MAX_NEW_TOKENS, tokens=DEMO_PROMPT_TOKENS)
        for need in {need for armed in faults for need in armed.fault.truth.needs} - BY_PROMPTS:
            assert need in NEEDS
            assert needed_by(faults) != needed_by(())


@pytest.mark.parametrize("model", ALL_MODELS)
def test_a_model_is_offered_the_faults_that_have_a_place_in_it_and_no_others(model: str) -> None:
    offered = faults_of(model)  # type: ignore[arg-type]
    for fault in EVERYTHING:
        if fault in offered:
            checked_faults(fault, model)  # type: ignore[arg-type]
        else:
            with pytest.raises(UsageError, match=r"has no place|cannot go into"):
                checked_faults(fault, model)  # type: ignore[arg-type]
    assert ("conv-zeroed" in offered) == (model == "hybrid")
    assert ("router-rows" in offered) == (model == "moe")
    assert ("window-short" in offered) == (model == "swa")


@pytest.mark.parametrize(
    ("fault", "asked", "says"),
    [
        ("padding-scale", {}, "32 rows are a multiple of its pad=8"),
        ("padding-scale:pad=3", {"samples": 9}, "9 rows are a multiple of its pad=3"),
        ("slot-reuse", {"samples": 1}, "another request"),
        ("restore-not-first", {"samples": 1}, "another request"),
        ("restore-key", {"helpers": ("match",)}, "match makes none"),
        ("o_proj-rows+restore-key", {"helpers": ("match",)}, "match makes none"),
        ("window-short", {"tokens": 40, "new_tokens": 24}, "crosses the window of 64"),
        ("decode-window", {"new_tokens": 17}, "16 decode steps, and it has after=16"),
        ("late-norm:after=200", {}, "127 decode steps, and it has after=200"),
        ("key-write", {"new_tokens": 4}, "3 decode steps, and it has step=4"),
        ("pair-outside", {"new_tokens": 6}, "5 decode steps, and it has step=6"),
    ],
)
def test_what_could_not_fire_is_refused_with_what_would_make_it(
    fault: str, asked: dict[str, object], says: str
) -> None:
    usual = {"samples": SAMPLES, "new_tokens": DEMO_MAX_NEW_TOKENS, "tokens": DEMO_PROMPT_TOKENS}
    with pytest.raises(UsageError, match="cannot fire here") as refused:
        check_can_fire(parse_faults(fault), **(usual | asked))  # type: ignore[arg-type]
    assert says in refused.value.why
    assert refused.value.next.startswith(("give --", "add --"))


@pytest.mark.parametrize(
    ("fault", "new_tokens"), [("decode-window", 18), ("key-write", 5), ("late-norm:after=1", 3)]
)
def test_the_fewest_tokens_with_which_a_fault_fires_are_enough(fault: str, new_tokens: int) -> None:
    check_can_fire(parse_faults(fault), samples=4, new_tokens=new_tokens, tokens=100)
    with pytest.raises(UsageError, match="cannot fire"):
        check_can_fire(parse_faults(fault), samples=4, new_tokens=new_tokens - 1, tokens=100)


async def launched(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[dict[str, str | None], dict[str, str], tuple[str, ...]]:
    """The server's arguments and environment for a demo with this fault, and what is said of it."""

    async def no_gpus() -> list[object]:
        return []

    monkeypatch.setattr(module, "list_gpus", no_gpus)
    (control := folder / "control").mkdir(mode=0o700)
    plan = await plan_launch(
        Demo("dense"),
        LaunchOptions(arguments=arguments, fault=fault),
        log=folder / "log",
        control_dir=control,
    )
    return parse_arguments(plan.spec.arguments), dict(plan.spec.environment), plan.notes


async def test_the_demo_is_started_with_what_its_fault_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_TEST_RETRACT", raising=False)
    arguments, environment, notes = await launched("chunk-key+stale-retraction", tmp_path, monkeypatch)
    assert arguments["--chunked-prefill-size"] == "128"
    assert "--disable-overlap-schedule" in arguments
    assert environment["SGLANG_TEST_RETRACT"] == "1"
    needed = "needs --chunked-prefill-size 128 --disable-overlap-schedule SGLANG_TEST_RETRACT=1"
    assert any(needed in note for note in notes)


async def test_the_users_own_settings_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "0")
    arguments, environment, _ = await launched(
        "chunk-key+stale-retraction", tmp_path, monkeypatch, "--chunked-prefill-size", "64"
    )
    assert arguments["--chunked-prefill-size"] == "64"
    assert environment["SGLANG_TEST_RETRACT"] == "0"


async def test_other_faults_change_nothing_about_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_TEST_RETRACT", raising=False)
    arguments, environment, notes = await launched("o_proj-rows", tmp_path, monkeypatch)
    assert "--chunked-prefill-size" not in arguments
    assert "SGLANG_TEST_RETRACT" not in environment
    assert not any("needs" in note for note in notes)
