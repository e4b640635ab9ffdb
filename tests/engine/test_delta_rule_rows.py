"""A gated delta rule is recomputed from what the dumper wrote of it, or not at all."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from klbench.core.alignment import Alignment, align  # noqa: E402
from klbench.core.findings import Evidence, Finding, Localisation  # noqa: E402
from klbench.core.localisation import localise  # noqa: E402
from klbench.core.recomputed import verdict  # noqa: E402
from klbench.core.trace import Trace  # noqa: E402
from klbench.engine.attention_rows import recompute_attention  # noqa: E402
from klbench.engine.delta_rule_rows import read_delta_rule, recompute_delta_rules  # noqa: E402
from klbench.engine.recomputed_rows import rows_behind  # noqa: E402
from klbench.errors import UndecidedError  # noqa: E402
from klbench.insitu.dumps import fetch_rows  # noqa: E402
from klbench.insitu.parameters import write_parameters  # noqa: E402
from tests.core.little_delta_rule import LittleDeltaRule  # noqa: E402
from tests.insitu.test_dumps import DumpFolder, foreign, mine  # noqa: E402
from tests.insitu.test_parameters import Mixer  # noqa: E402

PROMPT, ROWS = 90, 102
MODULE = "model.layers.0.linear_attn.attn"
NAMES = ("mixed_qkv", "a", "b")


class Reader:
    """Reads dumps as the process of the server's Python does."""

    async def fetch_rows(self, dump_dir: Path, wanted: list[dict[str, Any]], out_file: Path) -> None:
        fetch_rows(dump_dir, wanted, out_file)


class Dumped:
    """A request's arms, dumped: a prompt and steps of one row behind it, then all rows at once; each beside
    rows of others. `other` changes mixed_qkv in the generation arm: of that row of the prompt, or in decode
    from that row on."""

    def __init__(
        self,
        folder: Path,
        decode: Any,
        *,
        names: tuple[str, ...] = NAMES,
        other: int | None = None,
        out: Any = torch.bfloat16,
    ) -> None:
        self.folder = folder / "dumps"
        self.folder.mkdir()
        self.little = LittleDeltaRule(21, ROWS)
        self.names, self.other, self.out = names, other, out
        modules = {MODULE: {"class": "RadixLinearAttention", "state": "ssm", "window": None}}
        (self.folder / "modules-0.json").write_text(json.dumps(modules))
        scoring, _ = self.little.scan(ROWS)
        prompt, state = self.little.scan(PROMPT)
        steps = decode(self.little, state)
        self._dumps = DumpFolder(self.folder)
        self._forward(1, "extend", 0, PROMPT, prompt, "g", 3)
        for row in range(PROMPT, ROWS - 1):
            self._forward(row, "decode", row, row + 1, steps, "g", row % 2)
        self._forward(ROWS, "extend", 0, ROWS, scoring, "s", 5)
        rule = self.little.rule
        model = torch.nn.ModuleDict(
            {"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Mixer()])})}
        )
        sizes = {f"num_{name}_heads": rule.keys if name != "v" else rule.values for name in "qkv"}
        sizes |= {f"head_{name}_dim": rule.d_k for name in "qkv"}
        layer = model["model"]["layers"][0]
        layer.linear_attn = Mixer(
            conv_weights=torch.tensor(rule.conv).bfloat16(),
            A_log=torch.tensor(rule.a_log).float(),
            dt_bias=torch.tensor(rule.dt_bias).bfloat16(),
            **sizes,
        )
        self.parameters = self.folder / "parameters-0.safetensors"
        assert write_parameters(model, rf"^non_intrusive__({MODULE})\.(inputs|output)", self.parameters) == 1

    def _forward(
        self, number: int, mode: str, first: int, stop: int, out: Any, arm: str, before: int
    ) -> None:
        """With `before` rows of others in front of the request's own."""
        little, rows = self.little, slice(first, stop)
        mixed = little.mixed[rows].copy()
        if arm == "g" and self.other is not None and first <= self.other < stop:
            mixed[self.other - first, 0] += 1.0
        if mode == "decode" and self.other is not None and self.other < first and self.other >= PROMPT:
            mixed[:, 0] += 1.0
        given = dict(zip(self.names, (mixed, little.a[rows], little.b[rows]), strict=True))
        requests = [foreign(before)] if before else []
        requests.append(mine(stop - first, first, mode, arm))
        embedded = torch.arange(first, stop).float()[:, None]
        tensors = [("non_intrusive__model.embed_tokens.output", _behind(before, embedded.numpy()))]
        tensors += [
            (f"non_intrusive__{MODULE}.inputs.{name}", _behind(before, x)) for name, x in given.items()
        ]
        tensors.append((f"non_intrusive__{MODULE}.output", _behind(before, out[rows])[None].to(self.out)))
        self._dumps.forward(number, mode, requests, tensors)

    def located(self) -> tuple[Trace, Localisation, dict[int, Alignment]]:
        trace = self._dumps.trace()
        alignment = align(trace, 3, 0)
        assert alignment.proved, alignment.reason
        found = localise(trace, [alignment], np.arange(PROMPT + 1, ROWS), first_token=PROMPT)
        return trace, found, {0: alignment}

    def recomputed(self) -> Finding:
        """The first finding, after it was recomputed."""
        trace, found, aligned = self.located()
        assert (found.findings[0].module, found.findings[0].first_position) == (MODULE, PROMPT)
        after = asyncio.run(recompute_delta_rules(Reader(), self.folder, trace, found, aligned))  # type: ignore[arg-type]
        return after.findings[0]


def _behind(rows: int, values: Any) -> Any:
    """bfloat16 [rows + R, ...]: others' rows, then these."""
    own = torch.tensor(values).bfloat16()
    return torch.cat([torch.randn(rows, *own.shape[1:]).bfloat16(), own])


def right(little: LittleDeltaRule, state: Any) -> Any:
    return little.step(PROMPT, state)


def stale(little: LittleDeltaRule, _: Any) -> Any:
    return little.step(PROMPT, little.scan(PROMPT - 26)[1])


@pytest.mark.parametrize("names", [NAMES, ("1", "2", "3"), ("0", "1", "2")])
def test_two_ways_to_round_leave_the_operator_alone(names: tuple[str, ...], tmp_path: Path) -> None:
    found = Dumped(tmp_path, right, names=names).recomputed()
    assert (found.kinds, found.grade, verdict(found)) == (("operator",), "probable", "rounding")
    fact = found.evidence[-1]
    assert fact.code == "delta_rule_reference"
    assert fact.values["rows"] == ROWS - 1 - PROMPT


def test_outputs_in_float32_are_no_more_exact_than_their_inputs(tmp_path: Path) -> None:
    assert verdict(Dumped(tmp_path, right, out=torch.float32).recomputed()) == "rounding"


def test_a_stale_state_leaves_the_restore_the_write_and_the_function(tmp_path: Path) -> None:
    found = Dumped(tmp_path, stale).recomputed()
    assert (found.kinds, found.grade) == (("state_restore", "state_write", "operator"), "probable")
    assert (verdict(found), found.evidence[-1].values["side"]) == ("other_function", "generation")


def test_more_of_the_generation_is_repeated_where_nobody_saw_the_state(tmp_path: Path) -> None:
    _, found, _ = Dumped(tmp_path, right).located()
    for count, behind in ((1, 7), (30, 29), (500, 63)):
        assert rows_behind(dataclasses.replace(found.findings[0], count=count)) == behind
    seen = Evidence("state_equal", "The state is equal.", {})
    assert rows_behind(dataclasses.replace(found.findings[0], count=500, evidence=(seen,))) == 7
    assert rows_behind(dataclasses.replace(found.findings[0], count=500, evidence=())) == 0


def test_only_rows_with_equal_inputs_are_judged(tmp_path: Path) -> None:
    found = Dumped(tmp_path, right, other=PROMPT + 5).recomputed()
    assert found.evidence[-1].values["rows"] == 5


def test_a_state_that_was_made_from_other_rows_is_no_fault(tmp_path: Path) -> None:
    dumped = Dumped(tmp_path, stale)
    found = dumped.located()[1]
    assert verdict(dumped.recomputed()) == "other_function"
    other = tmp_path / "other"
    other.mkdir()
    given = Dumped(other, stale, other=40)
    given_trace, _, given_aligned = given.located()
    # As where the state is read, but not its rows: only they tell that it was made from others.
    after = asyncio.run(recompute_delta_rules(Reader(), given.folder, given_trace, found, given_aligned))  # type: ignore[arg-type]
    assert verdict(after.findings[0]) == "unknown"
    assert after.findings[0].kinds == found.findings[0].kinds
    assert "not known to be the same" in after.findings[0].evidence[-1].text


def test_without_parameters_nothing_is_judged(tmp_path: Path) -> None:
    dumped = Dumped(tmp_path, right)
    dumped.parameters.unlink()
    found = dumped.recomputed()
    assert verdict(found) is None
    assert found.kinds == ("operator", "state_restore", "state_write", "not_observed")


@pytest.mark.parametrize("limit", ["MOST_ROWS", "_MOST_NUMBERS", "_MOST_WORK"])
def test_what_would_take_too_long_is_not_judged(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped = Dumped(tmp_path, right)
    # 101 rows of 256 channels, and as many of a state of 4 x 32 x 32 numbers.
    each = {"MOST_ROWS": 1, "_MOST_NUMBERS": 256, "_MOST_WORK": 4096}[limit]
    for rows, said in ((100, None), (101, "rounding")):
        monkeypatch.setattr(f"klbench.engine.delta_rule_rows.{limit}", rows * each)
        trace, found, aligned = dumped.located()
        after = asyncio.run(recompute_delta_rules(Reader(), dumped.folder, trace, found, aligned))  # type: ignore[arg-type]
        assert verdict(after.findings[0]) == said


def test_it_is_not_taken_for_an_attention(tmp_path: Path) -> None:
    class Refusing:
        async def fetch_rows(self, *_: Any) -> None:
            raise AssertionError("rows of an attention were asked for")

    trace, found, aligned = Dumped(tmp_path, right, names=("0", "1", "2")).located()
    pairs = {0: aligned[0].pairs}
    after = asyncio.run(
        recompute_attention(Refusing(), tmp_path, trace, found, pairs, {"head_dim": 32})  # type: ignore[arg-type]
    )
    assert after == found


def test_a_scoring_arm_that_lacks_rows_and_a_damaged_file_judge_nothing(tmp_path: Path) -> None:
    dumped = Dumped(tmp_path, right)
    trace, found, aligned = dumped.located()
    later = dataclasses.replace(
        trace, row_position=np.where(trace.row_position == 7, 7000, trace.row_position)
    )
    dumped_in = dumped.folder
    assert asyncio.run(recompute_delta_rules(Reader(), dumped_in, later, found, aligned)) == found  # type: ignore[arg-type]
    dumped.parameters.write_bytes(b"\xff" * 40)
    assert asyncio.run(recompute_delta_rules(Reader(), dumped_in, trace, found, aligned)) == found  # type: ignore[arg-type]


def damaged(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> Path:
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("about", "tensors"),
    [
        ({"num_k_heads": 3}, {}),
        # Heads of values that are no multiple of those of keys, and a state that is larger than any.
        ({"num_q_heads": 3, "num_k_heads": 3}, {"conv_weights": (320, 4)}),
        (
            dict.fromkeys(("num_q_heads", "num_k_heads", "num_v_heads"), 1)
            | {f"head_{name}_dim": 4096 for name in "qkv"},
            {"conv_weights": (3 * 4096, 1), "A_log": (1,), "dt_bias": (1,)},
        ),
        ({"num_v_heads": 0}, {}),
        ({"num_q_heads": 1}, {}),
        ({"head_v_dim": 1 << 30}, {}),
        ({"activation": "gelu"}, {}),
        ({}, {"conv_weights": (5, 4)}),
        ({}, {"conv_weights": (256,)}),
        ({}, {"conv_weights": (256, 65)}),
        ({}, {"A_log": (5,)}),
        ({}, {"dt_bias": (128,)}),
        ({}, {"bias": (3,)}),
        ({}, {"A_log": None}),
    ],
)
def test_parameters_that_fit_no_gated_delta_rule_are_none(
    about: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "activation": "silu"}
    sizes |= {f"head_{name}_dim": 32 for name in "qkv"}
    shapes = {"conv_weights": (256, 4), "A_log": (4,), "dt_bias": (4,)}
    path = tmp_path / "parameters-0.safetensors"

    def written(about: dict[str, Any], shapes: dict[str, Any]) -> Path:
        own = {f"{MODULE}/{name}": torch.zeros(shape) for name, shape in shapes.items() if shape is not None}
        return damaged(path, own, {"modules": json.dumps({MODULE: about})})

    assert read_delta_rule(written(sizes, shapes), MODULE) is not None
    assert read_delta_rule(path, "model.layers.1.linear_attn.attn") is None
    assert read_delta_rule(written({**sizes, **about}, {**shapes, **tensors}), MODULE) is None


@pytest.mark.parametrize(
    "modules", ["{", '{"a": 3}', json.dumps({MODULE: {"num_q_heads": "two"}}), "[" * 9999]
)
def test_descriptions_that_are_none_are_an_error_of_ours(modules: str, tmp_path: Path) -> None:
    path = damaged(tmp_path / "parameters-0.safetensors", {"x": torch.zeros(1)}, {"modules": modules})
    with pytest.raises(UndecidedError, match="cannot be read"):
        read_delta_rule(path, MODULE)
