"""A real sglang server on a model of the zoo, and sglang's three helpers spoken to it, for tests and by hand.

The helpers repeat sglang/test/kl_test_utils.py: the same requests in the same order, the same arithmetic.
Run as a program it measures a matrix of servers and prints one line each:

    $ python tests/insitu/zoo_server.py dense "dense:restore-key --quick" "dense --page-size 16"
    dense    start 19.8 s | match 0 (0 of 4096, hits 0/32, 0 dirty from -, 4.1 s) | prefill_cache_hit 0 ...
"""

import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from klbench.engine.pythonpath import cpu_launch_flags, plugin_environment
from klbench.zoo import Kind, make_model, plain_token_ids, seeded_prompts, zoo_root

START_TIMEOUT_S = 1800
REQUEST_TIMEOUT_S = 900
COMMA_ID = 44  # "," is one byte, and a byte is its own id


@dataclass(frozen=True)
class HelperReading:
    """What one helper read."""

    avg_kl_div: float
    tokens: int
    divergent: int
    hits: int
    requests: int
    first_offsets: tuple[int, ...]
    elapsed_s: float


class ZooServer:
    """A started server; `control_dir` holds what the plugin wrote."""

    def __init__(self, url: str, control_dir: Path, nonce: str, start_s: float) -> None:
        self.url = url
        self.control_dir = control_dir
        self.nonce = nonce
        self.start_s = start_s
        self._arms = itertools.count()

    def presences(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.control_dir.glob("presence-*.json"))]

    def fired(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.control_dir.glob("fired-*.json"))]

    def post(self, path: str, body: Any = None) -> bytes:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode() if body is not None else b"",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            return bytes(response.read())

    def flush(self) -> None:
        self.post("/flush_cache?timeout=30")

    def generate(self, input_ids: list[list[int]], max_new_tokens: int, **more: Any) -> list[dict[str, Any]]:
        arm = next(self._arms)
        body = {
            "rid": [f"klb-{self.nonce}-arm{arm}-{index}" for index in range(len(input_ids))],
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            **more,
        }
        results: list[dict[str, Any]] = json.loads(self.post("/generate", body))
        assert len(results) == len(input_ids)
        return results

    def _decoded(self, input_ids: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        return self.generate(
            input_ids, new_tokens, return_logprob=True, return_text_in_logprobs=False, logprob_start_len=-1
        )

    def _compare(
        self, prompts: list[list[int]], results: list[dict[str, Any]], requests: int, started: float
    ) -> HelperReading:
        outputs = [[x[0] for x in r["meta_info"]["output_token_logprobs"]] for r in results]
        self.flush()
        scored = self.generate(
            [prompt + r["output_ids"] for prompt, r in zip(prompts, results, strict=True)],
            0,
            return_logprob=True,
            return_text_in_logprobs=False,
            logprob_start_len=0,
        )
        means, offsets = [], []
        divergent = tokens = 0
        for output, score in zip(outputs, scored, strict=True):
            entries = [x[0] for x in score["meta_info"]["input_token_logprobs"]][-len(output) :]
            logr = np.array(entries) - np.array(output)
            means.append(np.mean((np.exp(logr) - 1) - logr))
            differs = np.array(entries, dtype=np.float32) != np.array(output, dtype=np.float32)
            divergent += int(differs.sum())
            tokens += len(output)
            if differs.any():
                offsets.append(int(differs.argmax()))
        return HelperReading(
            avg_kl_div=float(sum(means) / len(means)),
            tokens=tokens,
            divergent=divergent,
            hits=sum(r["meta_info"]["cached_tokens"] > 0 for r in results),
            requests=requests,
            first_offsets=tuple(offsets),
            elapsed_s=time.monotonic() - started,
        )

    def match(self, prompts: list[list[int]], new_tokens: int) -> HelperReading:
        started = time.monotonic()
        self.flush()
        return self._compare(prompts, self._decoded(prompts, new_tokens), len(prompts), started)

    def prefill_cache_hit(self, prompts: list[list[int]], new_tokens: int) -> HelperReading:
        started = time.monotonic()
        self.flush()
        self.generate(prompts, 0)
        results = self._decoded(prompts, new_tokens)
        kept = [(p, r) for p, r in zip(prompts, results, strict=True) if r["meta_info"]["cached_tokens"] > 0]
        assert len(kept) > 0.5 * len(prompts)
        return self._compare([p for p, _ in kept], [r for _, r in kept], len(prompts), started)

    def decode_cache_hit(self, prompts: list[list[int]], new_tokens: int) -> HelperReading:
        started = time.monotonic()
        self.flush()
        first = self._decoded(prompts, new_tokens)
        second = [p + r["output_ids"] + [COMMA_ID] for p, r in zip(prompts, first, strict=True)]
        results = self._decoded(second, new_tokens)
        kept = [
            (turn, r)
            for prompt, turn, r in zip(prompts, second, results, strict=True)
            if r["meta_info"]["cached_tokens"] > len(prompt) + 1
        ]
        assert len(kept) > 0.5 * len(prompts)
        return self._compare([p for p, _ in kept], [r for _, r in kept], len(prompts), started)

    def helpers(
        self, samples: int = 32, prompt_tokens: int = 300, new_tokens: int = 128
    ) -> dict[str, HelperReading]:
        prompts = seeded_prompts(samples, prompt_tokens, 7, plain_token_ids())
        return {
            name: getattr(self, name)(prompts, new_tokens)
            for name in ("match", "prefill_cache_hit", "decode_cache_hit")
        }


def _free_port() -> int:
    """A port that nobody listens on, below those that the system gives to connections: the server takes it
    only when it has started, a minute later."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choose = random.SystemRandom().randrange
    while True:
        port = choose(10_000, max(first_given, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def zoo_server(
    kind: Kind,
    flags: Sequence[str] = (),
    fault: str | None = None,
    deterministic: bool = True,
    model: Path | None = None,
    exports: Mapping[str, str] | None = None,
) -> Iterator[ZooServer]:
    """A server of sglang on this machine's CPU, ended (by its own process group) when the block is left.

    `model` is another model's folder instead of the zoo's. `exports` go on top of its environment, with its
    nonce for NONCE; it runs in the folder above its control folder.
    """
    model = model or make_model(kind, zoo_root())
    nonce = os.urandom(4).hex()
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="klbench-test-") as folder:
        control_dir = Path(folder) / nonce
        control_dir.mkdir(mode=0o700)
        environment = plugin_environment(
            control_dir, nonce, cpu=True, fault=fault, base_env=os.environ, offline=True
        )
        environment |= {name: value.replace("NONCE", nonce) for name, value in (exports or {}).items()}
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *cpu_launch_flags(),
            *(["--enable-deterministic-inference"] if deterministic else []),
            *flags,
        ]
        log = control_dir / "server.log"
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, log)
            yield ZooServer(url, control_dir, nonce, time.monotonic() - started)
        except BaseException:
            print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
            raise
        finally:
            if keep := os.environ.get("KLBENCH_TEST_KEEP_LOG"):
                Path(keep).write_bytes(log.read_bytes())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    ready = b"The server is fired up"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it was ready")
        if ready in log.read_bytes():
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {START_TIMEOUT_S} s")


def _main(cases: Sequence[str]) -> None:
    for case in cases:
        target, *flags = case.split()
        kind, _, fault = target.partition(":")
        plain, quick = "--plain" in flags, "--quick" in flags
        flags = [flag for flag in flags if flag not in ("--plain", "--quick")]
        with zoo_server(kind, flags, fault or None, deterministic=not plain) as server:  # type: ignore[arg-type]
            readings = server.helpers(new_tokens=40 if quick else 128)
            time.sleep(1.2 if fault else 0)
            line = " | ".join(
                f"{name} {r.avg_kl_div:g} ({r.divergent} of {r.tokens}, hits {r.hits}/{r.requests}, "
                f"{len(r.first_offsets)} dirty from {min(r.first_offsets, default='-')}, {r.elapsed_s:.1f} s)"
                for name, r in readings.items()
            )
            print(f"{case:40s} start {server.start_s:.1f} s | {line}", flush=True)
            for presence in server.presences():
                print(
                    "   presence", json.dumps({k: presence[k] for k in presence if k != "nonce"}), flush=True
                )
            for fired in server.fired():
                print("   fired", json.dumps(fired), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
