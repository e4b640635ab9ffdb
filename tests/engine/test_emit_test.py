"""The emitted test file is Python whatever it is made of, and sglang's own classes run it and pass."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from klbench.cli import main
from klbench.engine.emit_test import KlCase, test_file

emitted_text = test_file
test_file.__test__ = False  # type: ignore[attr-defined]

CASE = KlCase(
    model="/models/Qwen3-8B",
    arguments=("--tp-size", "2"),
    deterministic=True,
    threshold_nats=1e-9,
    threshold_sentence="all three helpers measure exactly 0",
    averages={"match": 0.0, "prefill_cache_hit": 0.0, "decode_cache_hit": 0.0},
    samples=4,
    max_new_tokens=16,
    prompts={"source": "seed 1", "sha256": "ab" * 32},
    server={"sglang_version": "0.5.23", "tp_size": 2, "dtype": "bfloat16"},
    measured_at="2026-11-29T20:00:00Z",
    est_time_s=120,
    test_file_stem="test_qwen_kl",
)


def constants(text: str) -> dict[str, object]:
    """The class's plain attributes."""
    (case,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in case.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def test_the_file_has_the_model_the_threshold_and_its_measurement() -> None:
    text = emitted_text(CASE)
    found = constants(text)
    assert (found["model"], found["kl_div_thres"], found["kl_div_max_samples"]) == (
        "/models/Qwen3-8B",
        1e-9,
        4,
    )
    assert found["other_args"] == ["--enable-deterministic-inference", "--tp-size", "2"]
    assert "class TestQwen38BKL(KLDivergenceMixin, DefaultServerBase)" in text
    assert "# Measured 2026-11-29T20:00:00Z on sglang 0.5.23" in text
    assert "exactly 0" in text
    assert 'runner_config="2-gpu-large"' in text


@pytest.mark.parametrize(
    "hostile", ['a"""\nimport os\nos.abort()', "x'\\", "\x1b[31m\n    evil = 1", "{model}"]
)
def test_hostile_values_stay_values(hostile: str) -> None:
    case = replace(
        CASE,
        model=hostile,
        arguments=(hostile,),
        threshold_sentence=hostile,
        prompts={"source": hostile},
        server={"sglang_version": hostile},
    )
    text = emitted_text(case)
    found = constants(text)
    assert found["model"] == hostile
    assert found["other_args"][1] == hostile
    assert "evil" not in found
    assert {type(node) for node in ast.parse(text).body} == {
        ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef, ast.If,
    }  # fmt: skip
    assert "\x1b" not in text


@pytest.mark.server
def test_sglangs_own_classes_run_what_a_session_wrote_against_its_server_and_pass(
    tmp_path: Path, demo_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    running = demo_server()
    sizes = ("--samples", "4", "--max-new-tokens", "8", "--prompt-tokens", "60")
    file = tmp_path / "test_qwen_kl.py"
    assert main(["emit-test", "--url", running.url, "--yes-flush", *sizes, "--output", str(file)]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v", "test_qwen_kl"],
        cwd=tmp_path,
        env={**os.environ, "KL_TEST_BASE_URL": running.url},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "Ran 4 tests" in said
    assert "Using in-memory cached data (4 prompts)" in said
    assert said.count("avg_kl_div=0.0") == 3
