"""Phases and errors read from logs as sglang 0.5.17 and 0.5.23 write them."""

from __future__ import annotations

import pytest

from klbench.engine.phases import Phases, kv_cache_dtype, last_lines, own_error

START = """\
/site-packages/sglang/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still supported
[2026-11-29 19:17:49] server_args={'model_path': '/m'}
[2026-11-29 19:19:14] Load weight begin. avail mem=17.23 GB
[2026-11-29 19:19:14] Load weight end. elapsed=0.04 s, type=Qwen3ForCausalLM, avail mem=17.23 GB
[2026-11-29 19:19:16] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 65536, K size: 0.03 GB
[2026-11-29 19:19:16] Memory pool end. avail mem=16.99 GB
[2026-11-29 19:19:17] Capture decode CUDA graph begin. backend=full
[2026-11-29 19:19:18] Load weight begin. avail mem=17.23 GB
[2026-11-29 19:19:19] INFO:     Application startup complete.
[2026-11-29 19:19:20] INFO:     127.0.0.1:42444 - "POST /generate HTTP/1.1" 200 OK
[2026-11-29 19:19:20] The server is fired up and ready to roll!
"""

SCHEDULER_CRASH = """\
[2026-11-29 19:21:20] Prefill batch, #new-seq: 1, #new-token: 3
[2026-11-29 19:21:22] Scheduler hit an exception: Traceback (most recent call last):
  File "/sglang/srt/managers/scheduler.py", line 6360, in run_scheduler_process
    scheduler.run_event_loop()
  File "/torch/nn/functional.py", line 2621, in embedding
    return torch.embedding(weight, input)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
IndexError: index out of range in self

[2026-11-29 19:21:22] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Traceback (most recent call last):
  File "/sglang/srt/entrypoints/engine.py", line 1000, in _launch_subprocesses
    raise RuntimeError("Initialization failed. Please see the error messages above.")
RuntimeError: Initialization failed. Please see the error messages above.
"""


def test_a_start_goes_through_its_phases_once_and_only_forward() -> None:
    phases = Phases()
    seen = [phase for line in START.splitlines() if (phase := phases.feed(line))]
    assert seen == [
        "importing",
        "loading_weights",
        "allocating",
        "capturing_graphs",
        "warming_up",
        "ready",
    ]


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4", "loading_weights"),
        ("[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=138.10 GB", "loading_weights"),
        ("Capturing batches (bs=160 avail_mem=20.84 GB):   0%|", "capturing_graphs"),
        ("[2026-01-01 00:00:00 TP0] Capture piecewise CUDA graph begin. avail mem=20 GB", "capturing_graphs"),
        ("INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)", "warming_up"),
    ],
)
def test_each_spelling_of_a_phase_is_known(line: str, phase: str) -> None:
    assert Phases().feed(line) == phase


def test_an_empty_line_is_no_sign_of_a_phase() -> None:
    assert Phases().feed("   ") is None


def test_the_cache_type_in_force_is_read_from_the_log() -> None:
    assert kv_cache_dtype(START) == "bfloat16"
    assert kv_cache_dtype("nothing") is None


def test_the_schedulers_own_error_is_told_from_its_wrappers() -> None:
    error = own_error(SCHEDULER_CRASH)
    assert error is not None
    assert error.headline == "IndexError: index out of range in self"
    assert "run_scheduler_process" in "\n".join(error.lines)
    assert "Initialization failed" not in "\n".join(error.lines)


def test_of_a_chain_of_exceptions_the_last_is_the_headline_and_all_are_kept() -> None:
    error = own_error(
        "Traceback (most recent call last):\n  File a\nKeyError: 'x'\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  File b\nOSError: cannot load the config of /m\n"
    )
    assert error is not None
    assert error.headline == "OSError: cannot load the config of /m"
    assert "KeyError: 'x'" in error.lines


WATCHDOG = """\
Traceback (most recent call last):
  File "tokenizer.py", line 1, in fallback
KeyError: 'a harmless one, much earlier'
[2026-11-30 18:40:47] Scheduler debug info:
scheduler.cur_batch_for_debug.batch_size()=1
Thread 24413 (idle): "Thread-1 (_watchdog_thread)"
    pyspy_dump_schedulers (utils/cudacore_pyspy_dump_utils.py:84)
[2026-11-30 18:40:47] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)


[2026-11-30 18:40:52] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Thread 31445 (idle): "Thread-1 (_watchdog_thread)"
    WatchdogRaw._watchdog_once (utils/watchdog.py:147)
[2026-11-30 18:40:52] Waiting 60.0 seconds for CUDA coredumps before exiting.
"""


def test_the_watchdog_that_ended_the_server_is_its_own_error_among_all_those_stacks() -> None:
    error = own_error(WATCHDOG)
    assert error is not None
    assert error.headline == "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
    soft = own_error(WATCHDOG.replace("soft=False", "soft=True"))
    assert soft is not None
    assert "harmless" in soft.headline
    crash = own_error(WATCHDOG + SCHEDULER_CRASH)
    assert crash is not None
    assert crash.headline.startswith("IndexError")


@pytest.mark.parametrize("program", ["launch_server.py", "sglang serve"])
def test_what_the_argument_parser_refused_is_an_error_too(program: str) -> None:
    error = own_error(f"usage: {program} [-h]\n{program}: error: unrecognized arguments: --nope\n")
    assert error is not None
    assert error.headline == f"{program}: error: unrecognized arguments: --nope"


def test_a_wrapper_is_better_than_nothing() -> None:
    error = own_error("Traceback (most recent call last):\n  File a\nEOFError\n")
    assert error is not None
    assert error.headline == "EOFError"


def test_a_healthy_log_has_no_error() -> None:
    assert own_error(START) is None
    assert last_lines(START, 1) == ["[2026-11-29 19:19:20] The server is fired up and ready to roll!"]


def test_a_traceback_that_is_cut_off_does_no_harm() -> None:
    assert own_error("Traceback (most recent call last):\n  File a\n") is None
