"""Facts from a server's answers, what differs from what was asked, GPUs, launch flags."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from klbench.engine import target
from klbench.engine.facts import compare_with_asked, git_state, parse_arguments, read_facts
from klbench.engine.gpu import Gpu, choose_for_demo, parse_gpus, visible_gpus
from klbench.engine.server_python import Flags, find_server_python
from klbench.engine.target import Demo, Launch, LaunchOptions, _checked_model_path, eager_flags, plan_launch
from klbench.errors import ServerError, UsageError

GIB = 1 << 30
INFO = {
    "version": "0.5.23",
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "device": "cuda",
    "attention_backend": "fa3",
    "disable_radix_cache": True,
    "disable_overlap_schedule": False,
    "enable_deterministic_inference": True,
    "cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}},
    "page_size": 16,
    "tp_size": 2,
    "dp_size": 2,
    "pp_size": 1,
    "mem_fraction_static": 0.8,
    "max_total_num_tokens": 1000,
}
MODEL = {"model_path": "/models/m", "architectures": ["Gemma3ForCausalLM"]}


def gpu(index: int, used_bytes: int) -> Gpu:
    return Gpu(index, f"GPU-{index}aaa", "NVIDIA H200", "580.1", used_bytes, 140 * GIB)


def test_a_convolutions_width_and_its_checkpoints_are_facts_of_such_models_alone() -> None:
    info = {**INFO, "mamba_track_interval": 256}
    hybrid = read_facts(info, MODEL, config={"conv_L_cache": 3})
    assert (hybrid.conv_width, hybrid.checkpoint_interval) == (3, 256)
    dense = read_facts(info, MODEL, config={})
    assert (dense.conv_width, dense.checkpoint_interval) == (None, None)


def test_the_facts_say_what_is_in_force() -> None:
    facts = read_facts(
        INFO,
        MODEL,
        config={"text_config": {"torch_dtype": "bfloat16", "sliding_window": 64, "vocab_size": 9}},
        kv_dtype="bfloat16",
        gpus=[gpu(0, 0)],
        environment={"NCCL_ALGO": "tree", "HOME": "/h", "SGLANG_TRITON_X": "1"},
    )
    said = facts.as_dict()
    assert said["dtype"] == "bfloat16"
    assert said["kv_cache_dtype"] == "bfloat16"
    assert said["radix_cache"] is False
    assert said["overlap"] is True
    assert said["cuda_graphs"] is True
    assert said["deterministic"] is True
    assert said["gpus"] == ["NVIDIA H200"]
    assert said["driver"] == "580.1"
    assert said["numerics_env"] == {"NCCL_ALGO": "tree", "SGLANG_TRITON_X": "1"}
    assert (facts.sliding_window, facts.vocab_size, facts.model_processes) == (64, 9, 4)


def test_what_nobody_told_stays_unknown() -> None:
    said = read_facts({}, {}).as_dict()
    assert {name for name, value in said.items() if value not in (None, [])} == set()


def test_a_window_that_the_model_switches_off_is_no_window() -> None:
    assert (
        read_facts({}, {}, config={"sliding_window": 4096, "use_sliding_window": False}).sliding_window
        is None
    )


def test_ranks_of_data_parallel_attention_share_the_tensor_parallel_world() -> None:
    assert read_facts({**INFO, "enable_dp_attention": True}, MODEL).model_processes == 2


def test_differences_between_asked_and_in_force_are_named() -> None:
    asked = ["--page-size", "1", "--tp-size=2", "--mem-fraction-static", "0.80", "--attention-backend", "fa3"]
    assert compare_with_asked([*asked, "--disable-overlap-schedule", "--unknown", "1"], INFO) == [
        {"asked": "--page-size 1", "in_force": "page_size = 16"},
        {"asked": "--disable-overlap-schedule", "in_force": "disable_overlap_schedule = False"},
        {"asked": "radix cache on (the default)", "in_force": "disable_radix_cache = True"},
    ]


def test_the_last_of_two_equal_options_wins() -> None:
    assert parse_arguments(["--a", "1", "--b", "--a=2"]) == {"--a": "2", "--b": None}


async def test_a_checkout_has_a_commit_and_an_installed_package_has_none(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e@e")
        command = ["git", *identity, *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=environment)

    git("init", "-q")
    assert await git_state(package) is None, "inside a repository, but not tracked by it"
    git("add", "-A")
    git("commit", "-qm", "one")
    state = await git_state(package)
    assert state is not None
    assert (len(state[0]), state[1]) == (40, False)
    (package / "__init__.py").write_text("x = 1\n")
    assert (await git_state(package)) == (state[0], True)


def test_gpus_are_read_and_nonsense_is_left_out() -> None:
    answer = "0, GPU-0aaa, NVIDIA H200, 580.1, 512, 143771\nNo devices were found\n1, x\n"
    assert parse_gpus(answer) == [
        Gpu(0, "GPU-0aaa", "NVIDIA H200", "580.1", 512 << 20, 143771 << 20),
    ]


@pytest.mark.parametrize(
    ("listed", "seen"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("", []), ("-1", []), ("GPU-1a,7,0", [1])],
)
def test_cuda_visible_devices_is_respected(listed: str | None, seen: list[int]) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [g.index for g in visible_gpus([gpu(0, 0), gpu(1, 0)], environment)] == seen


def test_the_demo_takes_an_idle_gpu() -> None:
    assert choose_for_demo([gpu(0, 100 * GIB), gpu(1, 0)]).gpu == gpu(1, 0)


def test_a_gpu_that_somebody_fills_is_named_and_not_taken() -> None:
    choice = choose_for_demo([gpu(0, 130 * GIB)])
    assert choice.gpu is None
    assert "130.0 of 140.0 GiB in use" in choice.notes[0]


def test_eager_flags_are_spelled_as_the_installed_sglang_takes_them() -> None:
    phases = Flags({f"--cuda-graph-backend-{phase}": ("full", "disabled") for phase in ("decode", "prefill")})
    assert eager_flags(phases) == [
        *("--cuda-graph-backend-decode", "disabled"),
        *("--cuda-graph-backend-prefill", "disabled"),
    ]
    old = Flags({"--disable-cuda-graph": None, "--disable-piecewise-cuda-graph": None})
    assert eager_flags(old) == ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"]
    with pytest.raises(ServerError, match="CUDA graphs"):
        eager_flags(Flags({"--port": None}))


@pytest.mark.parametrize("ready", [True, False])
async def test_a_scheduler_that_is_captured_on_a_gpu_sleeps_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    """A polling scheduler would keep the interpreter from the thread that writes the trace."""
    control = tmp_path / "control"
    control.mkdir(mode=0o700)

    async def one_gpu() -> list[Gpu]:
        return [gpu(0, 0)]

    async def its_flags(*_: object) -> Flags:
        return Flags({"--disable-cuda-graph": None, "--sleep-on-idle": None})

    monkeypatch.setattr(target, "list_gpus", one_gpu)
    monkeypatch.setattr(target, "server_flags", its_flags)
    plan = await plan_launch(
        Demo("dense"), LaunchOptions(ready_to_capture=ready), log=tmp_path / "log", control_dir=control
    )
    assert ("--sleep-on-idle" in plan.spec.arguments) is ready
    assert ("--disable-cuda-graph" in plan.spec.arguments) is ready


@pytest.mark.parametrize(
    ("gpus", "ready", "users", "flags", "seconds"),
    [
        (1, True, (), {"--disable-cuda-graph": None, "--watchdog-timeout": None}, "1800"),
        (
            1,
            True,
            ("--watchdog-timeout", "60"),
            {"--disable-cuda-graph": None, "--watchdog-timeout": None},
            "60",
        ),
        (1, True, (), {"--disable-cuda-graph": None}, None),
        (1, False, (), {"--disable-cuda-graph": None, "--watchdog-timeout": None}, None),
        (0, True, (), {}, "1800"),
        (0, False, ("--watchdog-timeout", "60"), {}, "60"),
    ],
    ids=["gpu", "users-own", "unknown-there", "not-captured", "cpu", "users-own-cpu"],
)
async def test_the_watchdog_of_a_server_that_is_captured_waits_longer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    ready: bool,
    users: tuple[str, ...],
    flags: dict[str, None],
    seconds: str | None,
) -> None:
    control = tmp_path / "control"
    control.mkdir(mode=0o700)

    async def there() -> list[Gpu]:
        return [gpu(0, 0)][:gpus]

    async def its_flags(*_: object) -> Flags:
        return Flags(dict(flags))

    monkeypatch.setattr(target, "list_gpus", there)
    monkeypatch.setattr(target, "server_flags", its_flags)
    options = LaunchOptions(ready_to_capture=ready, arguments=users)
    plan = await plan_launch(Demo("dense"), options, log=tmp_path / "log", control_dir=control)
    given = parse_arguments(plan.spec.arguments)
    assert given.get("--watchdog-timeout") == seconds
    assert plan.spec.arguments.count("--watchdog-timeout") == (seconds is not None)


async def test_the_users_own_arguments_win_over_ours(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.mkdir(mode=0o700)
    options = LaunchOptions(
        arguments=("--attention-backend", "triton", "--port", "31999", "--api-key", "s3cret"),
    )
    plan = await plan_launch(Demo("dense"), options, log=tmp_path / "log", control_dir=control)
    arguments = plan.spec.arguments
    assert arguments.count("--attention-backend") == 1
    assert arguments[-6:] == options.arguments
    assert "--enable-deterministic-inference" in arguments
    assert plan.url == "http://127.0.0.1:31999"
    assert plan.api_key == "s3cret"
    assert "s3cret" not in plan.spec.as_line()


async def test_faults_are_planted_in_the_demo_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="demo only"):
        await plan_launch(
            Launch("/m"), LaunchOptions(fault="restore-key"), log=tmp_path / "log", control_dir=tmp_path
        )


async def test_a_python_without_sglang_is_passed_over_and_named(tmp_path: Path) -> None:
    bare = tmp_path / "bin" / "python"
    bare.parent.mkdir()
    bare.write_text("#!/bin/sh\nexit 7\n")
    bare.chmod(0o755)
    found = await find_server_python(None, {**os.environ, "VIRTUAL_ENV": str(tmp_path)})
    assert found.path != bare
    assert str(bare) in found.passed_over[0]
    with pytest.raises(ServerError, match="no Python with sglang") as error:
        await find_server_python(bare)
    assert str(bare) in error.value.why


def test_offline_a_missing_model_is_named_before_anything_starts(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    with pytest.raises(UsageError, match="org/model is not on this machine") as refused:
        _checked_model_path("org/model", offline)
    assert "HF_HUB_OFFLINE" in refused.value.why
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert _checked_model_path("org/model", offline) == "org/model"
    assert _checked_model_path("org/other", {}) == "org/other"


@pytest.mark.parametrize(("name", "word"), [("nowhere", "there is no model at"), ("empty", "holds no model")])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, name: str, word: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=word):
        _checked_model_path(str(tmp_path / name), {})
