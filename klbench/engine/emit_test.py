"""A sglang test file for a model, from what was measured: their KL mixin and fixture, our threshold.

    text = test_file(KlCase(model="/models/qwen3", ...))

The KL case has a deterministic server of its own: accuracy and KL cannot share one. The prompts are seeded
from a file beside the test, so that it runs without a network. Invariants: every value from outside is
written as a Python literal; a threshold never stands without the measurement that it comes from.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klbench.engine.target import DETERMINISTIC

PROMPTS_SUFFIX = "_prompts.json"
MIXIN_PROMPT_TOKENS, MIXIN_NUM_SAMPLES = 3000, 48
"""The lengths under which kl_test_utils looks up its prompts."""


@dataclass(frozen=True, slots=True)
class KlCase:
    """What the test needs to know. `averages`: helper -> avg_kl_div as measured; `arguments`: the user's."""

    model: str
    arguments: tuple[str, ...]
    deterministic: bool
    threshold_nats: float
    threshold_sentence: str
    averages: Mapping[str, float | None]
    samples: int
    max_new_tokens: int
    prompts: Mapping[str, Any]
    server: Mapping[str, Any]
    measured_at: str
    est_time_s: int
    test_file_stem: str
    demo: bool = False

    @property
    def class_name(self) -> str:
        words = re.findall(r"[A-Za-z0-9]+", self.model.rstrip("/").rpartition("/")[2])
        return "Test" + "".join(word[:1].upper() + word[1:] for word in words) + "KL"


def test_file(case: KlCase) -> str:
    """The text of the test file."""
    arguments = [DETERMINISTIC] if case.deterministic and DETERMINISTIC not in case.arguments else []
    arguments += case.arguments
    comment = "\n".join(f"    # {line}" for line in _measurement(case))
    return _TEMPLATE.format(
        title=_plain(f"KL consistency of {case.model.rstrip('/').rpartition('/')[2]}"),
        stem=_plain(case.test_file_stem),
        demo_note=_DEMO_NOTE if case.demo else "",
        est_time=case.est_time_s,
        runner_config=f"{max(1, int(case.server.get('tp_size') or 1))}-gpu-large",
        class_name=case.class_name,
        model=repr(case.model),
        threshold=repr(case.threshold_nats),
        comment=comment,
        samples=case.samples,
        max_new_tokens=case.max_new_tokens,
        arguments=_list(arguments),
        prompts_name=repr(f"{case.test_file_stem}{PROMPTS_SUFFIX}"),
        num_samples=max(MIXIN_NUM_SAMPLES, case.samples),
        prompt_tokens=MIXIN_PROMPT_TOKENS,
    )


def _measurement(case: KlCase) -> list[str]:
    """The comment above the threshold."""
    averages = ", ".join(f"{name} {value!r}" for name, value in case.averages.items())
    server = case.server
    facts = (
        f"sglang {server.get('sglang_version')}, {server.get('device')} {server.get('attention_backend')}, "
        f"tp {server.get('tp_size')}, {server.get('dtype')}, K/V {server.get('kv_cache_dtype')}"
    )
    said = (
        f"Measured {case.measured_at} on {facts}: avg_kl_div {averages}, with {case.samples} prompts "
        f"({case.prompts.get('source')}, sha256 {str(case.prompts.get('sha256'))[:16]}) x "
        f"{case.max_new_tokens} tokens. {case.threshold_sentence[:1].upper()}{case.threshold_sentence[1:]}."
    )
    return textwrap.wrap(_plain(said), 96)


def _plain(text: str) -> str:
    """Text that can stand in a comment or a docstring: one line, no quotes that end it, no escapes."""
    kept = "".join(c if c.isprintable() else " " for c in text)
    return kept.replace("\\", "/").replace('"', "'")


def _list(arguments: Sequence[str]) -> str:
    return "".join(f"        {argument!r},\n" for argument in arguments)


_DEMO_NOTE = """
The demo's CPU server needs klbench's plugin: start it with `klbench demo` and name it with KL_TEST_BASE_URL.
"""

_TEMPLATE = '''\
"""{title}: prefill and decode logprobs must agree.

The server is deterministic and this test's own: accuracy tests need another one. Against a server that runs
already: KL_TEST_BASE_URL=http://127.0.0.1:30000 python3 -m unittest {stem}
{demo_note}"""

import json
import os
import unittest

from sglang.test import kl_test_utils
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.server_fixtures.default_fixture import DefaultServerBase

register_cuda_ci(est_time={est_time}, stage="extra-a", runner_config="{runner_config}")

PROMPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), {prompts_name})


def seed_prompts(model):
    """Gives kl_test_utils its prompts without a network, and the same ones each time."""
    with open(PROMPTS) as f:
        kl_test_utils._cached_input_ids[f"{{model}}_{prompt_tokens}_{num_samples}"] = json.load(f)


class {class_name}(KLDivergenceMixin, DefaultServerBase):
    model = {model}
{comment}
    kl_div_thres = {threshold}
    kl_div_max_samples = {samples}
    kl_div_prefill_max_new_tokens = {max_new_tokens}
    kl_div_decode_max_new_tokens = {max_new_tokens}
    other_args = [
{arguments}    ]

    @classmethod
    def setUpClass(cls):
        seed_prompts(cls.model)
        cls.process = None
        running = os.environ.get("KL_TEST_BASE_URL")
        if running:
            cls.base_url = running
        else:
            super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        if cls.process is not None:
            super().tearDownClass()

    def test_input_output_logprobs_match(self):
        kl_test_utils.test_input_output_logprobs_match_helper(
            base_url=self.base_url,
            ACC_THRESHOLDS=self._build_acc_thresholds(self.kl_div_thres),
            model_name=self.model,
            max_samples=self.kl_div_max_samples,
            max_new_tokens=self.kl_div_prefill_max_new_tokens,
        )

    def test_the_radix_cache_is_on(self):
        """Without it the two cache helpers print and pass."""
        import requests

        info = requests.get(self.base_url + "/server_info").json()
        self.assertFalse(info["disable_radix_cache"])


if __name__ == "__main__":
    unittest.main()
'''
