"""The script of an export: a few lines of torch and safetensors that show the difference without klbench.

Where an operator's arithmetic can be restated (linear layers, RMS norms, SiLU-and-mul) it is done again with
each number of rows, beside the outputs that the server gave; otherwise the script compares those alone and
says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_HEAD = '''"""{title}

{claim}

    python show.py        needs torch and safetensors, no server and no klbench
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

t = load_file(str(Path(__file__).with_name("tensors.safetensors")))
'''

_RECORDED = """
# The row's output in the server, by how many rows shared the call.
recorded = {{
    m: t[name]
    for m, name in ({outputs}
    )
}}
alone = recorded[{first}]
"""

_RECORDED_ALONE = """for m, output in recorded.items():
    count = int((output != alone).sum())
    print(f"{{m:6d}} rows: {{count}} of {{len(output)}} elements differ from {first} row")
print("These are the server's outputs; its arithmetic is not done again here: {why}.")
"""

_ARMS = """
# The row of each arm, as the server computed it: equal inputs, other outputs.
for name in sorted(key[:-2] for key in t if key.endswith(".a")):
    a, b = t[name + ".a"], t[name + ".b"]
    largest = (a.double() - b.double()).abs().max().item()
    print(f"{{name}}: {{int((a != b).sum())}} of {{a.numel()}} elements differ, by {{largest:.3g}} at most")
print("The operator's arithmetic is not restated here: {why}.")
"""

_RESTATED = """
# The same arithmetic in plain torch, on the same rows: the judged one first, then its neighbours.
row, rows = {row}, {rows}


def operator(m, to=lambda tensor: tensor):
    batch = (row + torch.arange(m)) % rows
{body}


here = {{m: operator(m)[0].flatten() for m in recorded}}
exact = operator(1, lambda tensor: tensor.double())[0].flatten()
print("elements that differ from {first} row, and the distance from the result in float64")
for m, output in recorded.items():
    count, mine = int((output != alone).sum()), int((here[m] != here[{first}]).sum())
    off = (output{cut}.double() - exact).abs().max().item()
    print(f"{{m:6d}} rows: server {{count:4d}}, plain torch here {{mine:4d}}; server off by {{off:.3g}}")
same = torch.equal(here[{first}], alone{cut})
print("with {first} row plain torch gives", "the server's bits" if same else "other bits")
if any(not torch.equal(output, here[{first}]) for output in here.values()):
    print("Plain torch on this device depends on the number of rows too: no server is needed to show it.")
else:
    print("Plain torch on this device does not depend on the number of rows: the server's own call does.")
"""


@dataclass(frozen=True, slots=True)
class Restated:
    """An operator's arithmetic as lines of torch: they return its output for `batch`, the rows' numbers, with
    every tensor passed through `to`."""

    lines: tuple[str, ...]
    sliced: bool = False
    """Only the outputs in t["elements"] are restated, for only their weights were kept."""


def restated(class_name: str, tensors: Collection[str], attributes: Mapping[str, object]) -> Restated | str:
    """The arithmetic of an operator of this class, or why it cannot be restated."""
    inputs = sorted(name for name in tensors if name.startswith("input."))
    weights = sorted(name for name in tensors if name.startswith("weight."))
    if class_name.endswith("Linear") or class_name == "ParallelLMHead":
        if len(inputs) == 1 and weights in (["weight.weight"], ["weight.bias", "weight.weight"]):
            bias = 'to(t["weight.bias"])' if "weight.bias" in weights else "None"
            line = f'return F.linear(to(t["{inputs[0]}"])[batch], to(t["weight.weight"]), {bias})'
            return Restated((line,), "elements" in tensors)
        return f"a {class_name} with other weights than one matrix (quantised?) is more than a few lines"
    if class_name in _NORMS:
        return _norm(class_name, inputs, weights, attributes)
    if class_name == "SiluAndMul" and len(inputs) == 1:
        return Restated(
            (
                f'x = to(t["{inputs[0]}"])[batch]',
                "return F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]",
            )
        )
    return f"a {class_name or 'function'} is more than a few lines of torch"


def _norm(
    class_name: str, inputs: list[str], weights: list[str], attributes: Mapping[str, object]
) -> Restated | str:
    eps = attributes.get("variance_epsilon", attributes.get("eps"))
    residual = [name for name in inputs if name.endswith("residual")]
    plain = [name for name in inputs if name not in residual]
    if len(plain) != 1 or weights != ["weight.weight"] or not isinstance(eps, float):
        return f"a {class_name} with {', '.join(inputs + weights)} is not known"
    added = f' + to(t["{residual[0]}"])' if residual else ""
    gemma = class_name.startswith("Gemma")
    return Restated(
        (
            f'x, w = to(t["{plain[0]}"]){added}, to(t["weight.weight"])',
            "x = x.reshape(rows, -1, x.shape[-1])[batch]",
            "wide = x if x.dtype == torch.float64 else x.float()",
            f"wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + {eps!r})",
            "return (wide * (1 + w.to(wide.dtype))).to(x.dtype)" if gemma else "return wide.to(x.dtype) * w",
        )
    )


_NORMS = ("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm")


def replay_script(
    *,
    title: str,
    claim: str,
    outputs: Mapping[int, str],
    row: int,
    rows: int,
    arithmetic: Restated | str,
) -> str:
    """The script for an operator that was replayed; `outputs` names the recorded tensor of each M."""
    first = min(outputs)
    text = _HEAD.format(title=_plain(title), claim=_plain(claim))
    listed = "".join(f"\n        ({m}, {name!r})," for m, name in sorted(outputs.items()))
    text += _RECORDED.format(outputs=listed, first=first)
    if isinstance(arithmetic, str):
        return text + _RECORDED_ALONE.format(why=_plain(arithmetic), first=first)
    return text + _RESTATED.format(
        row=row,
        rows=rows,
        first=first,
        body="\n".join(f"    {line}" for line in arithmetic.lines),
        cut='[t["elements"]]' if arithmetic.sliced else "",
    )


def arms_script(*, title: str, claim: str, why: str) -> str:
    """The script that compares the recorded rows of both arms, and no more."""
    return _HEAD.format(title=_plain(title), claim=_plain(claim)) + _ARMS.format(why=_plain(why))


def _plain(text: str) -> str:
    """Text from outside, safe within a docstring and a string of the script."""
    return "".join(char if char.isprintable() and char not in '"\\{}' else "?" for char in text)
