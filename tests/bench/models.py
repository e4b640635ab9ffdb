"""Models for benchmarks: the zoo's dense one, of any depth, width, number of heads and context."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from klbench.zoo import zoo_root
from klbench.zoo.architectures import Recipe, WeightPlan, recipe
from klbench.zoo.models import make_from_recipe


@dataclass(frozen=True, slots=True)
class Shape:
    """What a dense model's tensors are cut to; the zoo's own numbers unless told."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 256
    context: int = 8192


WIDE = Shape(width=1024, heads=8, head_dim=128, inner=2048)
"""Rows as wide as those of a small real model."""
SLIM = Shape(layers=1, heads=1, kv_heads=1, context=16384)
"""The least work for a server: what is left of a measurement is the client's."""


def model_folder(shape: Shape) -> Path:
    """The folder of such a model, made if it is not there yet."""
    return make_from_recipe(dense_recipe(shape), zoo_root())


def dense_recipe(shape: Shape) -> Recipe:
    """The zoo's dense recipe in another shape, with the spreads that keep its activations where they were."""
    dense = recipe("dense")
    config = dense.config | {
        "num_hidden_layers": shape.layers,
        "max_window_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.context,
    }
    ends = [plan for plan in dense.weights if ".layers." not in plan.name]
    layer = [plan for plan in dense.weights if plan.name.startswith("model.layers.0.")]
    plans = [_cut(plan, shape) for plan in ends]
    for number in range(shape.layers):
        renamed = (
            dataclasses.replace(plan, name=plan.name.replace(".layers.0.", f".layers.{number}."))
            for plan in layer
        )
        plans += [_cut(plan, shape) for plan in renamed]
    return dataclasses.replace(dense, config=config, weights=tuple(plans))


def _cut(plan: WeightPlan, shape: Shape) -> WeightPlan:
    """The tensor in its new shape; a matrix keeps the size of its products."""
    kind = re.sub(r"^.*?(\w+)\.weight$", r"\1", plan.name)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": (queries, shape.width),
        "k_proj": (keys, shape.width),
        "v_proj": (keys, shape.width),
        "o_proj": (shape.width, queries),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "gate_proj": (shape.inner, shape.width),
        "up_proj": (shape.inner, shape.width),
        "down_proj": (shape.width, shape.inner),
        "embed_tokens": (plan.shape[0], shape.width),
        "lm_head": (plan.shape[0], shape.width),
    }
    new = sizes.get(kind, (shape.width,))
    narrower = (plan.shape[1] / new[1]) ** 0.5 if len(new) == 2 and kind != "embed_tokens" else 1.0
    return dataclasses.replace(plan, shape=new, spread=plan.spread * narrower)
