"""The models of the GPU list: 12 layers of width 1024, heads of 128, a vocabulary of 32,000, random weights.

    $ python -m tests.gpu.models /tmp/models dense moe     # makes them, a few seconds each

`dense` is Qwen3, `moe` Qwen3-MoE (32 experts, top 4), `swa` Mellum (windows of 256 in three layers of four,
so that sglang keeps a pool of its own for them), `hybrid` LFM2 (short convolutions), `linear` Qwen3-Next
(gated delta rule). Only the text tokens of the zoo's tokenizer are likely; ids beyond it are `<number>`.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from klbench.zoo.architectures import Kind, Recipe, WeightPlan
from klbench.zoo.models import make_from_recipe
from klbench.zoo.tokenizer import END_OF_TEXT_ID, VOCAB_SIZE, tokenizer_config, tokenizer_json

VOCABULARY = 32_000
CONTEXT_LENGTH = 16_384
HIDDEN = 1024
HEADS = 16
KV_HEADS = 4
HEAD_DIM = 128
LAYERS = 12
INNER = 2048
EXPERTS, TOP_K, EXPERT_INNER = 32, 4, 512
SLIDING_WINDOW = 256
CONV_WIDTH = 3
LINEAR_HEADS, LINEAR_CONV_WIDTH, LINEAR_EXPERTS = 8, 4, 8


@dataclass(frozen=True)
class WideRecipe(Recipe):
    """A recipe whose tokenizer covers the whole vocabulary."""

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        tokenizer = tokenizer_json()
        vocabulary = dict(tokenizer["model"]["vocab"])
        vocabulary |= {f"<{index}>": index for index in range(VOCAB_SIZE, VOCABULARY)}
        tokenizer["model"] = tokenizer["model"] | {"vocab": vocabulary}
        return {
            "config.json": self.config,
            "generation_config.json": {"eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID},
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": tokenizer_config(CONTEXT_LENGTH),
        }


def _linear(name: str, rows: int, columns: int, gain: float = 1.0) -> WeightPlan:
    return WeightPlan(f"{name}.weight", (rows, columns), gain / columns**0.5)


def _norm(name: str, size: int, mean: float) -> WeightPlan:
    return WeightPlan(f"{name}.weight", (size,), 0.05, mean)


def _ends(norm: str = "model.norm", norm_mean: float = 1.0) -> list[WeightPlan]:
    return [
        WeightPlan("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0.5),
        _norm(norm, HIDDEN, norm_mean),
        WeightPlan("lm_head.weight", (VOCABULARY, HIDDEN), 2.8 / HIDDEN**0.5, vocabulary_rows=True),
    ]


def _attention(prefix: str, head_norm_mean: float = 1.5, query_heads: int = HEADS) -> list[WeightPlan]:
    return [
        _linear(f"{prefix}.self_attn.q_proj", query_heads * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, gain=2.0),
        _norm(f"{prefix}.self_attn.q_norm", HEAD_DIM, head_norm_mean),
        _norm(f"{prefix}.self_attn.k_norm", HEAD_DIM, head_norm_mean),
    ]


def _layer_norms(prefix: str, mean: float = 1.0) -> list[WeightPlan]:
    return [
        _norm(f"{prefix}.input_layernorm", HIDDEN, mean),
        _norm(f"{prefix}.post_attention_layernorm", HIDDEN, mean),
    ]


def _mlp(prefix: str, width: int) -> list[WeightPlan]:
    return [
        _linear(f"{prefix}.gate_proj", width, HIDDEN),
        _linear(f"{prefix}.up_proj", width, HIDDEN),
        _linear(f"{prefix}.down_proj", HIDDEN, width, gain=2.0),
    ]


def _config(architecture: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "bos_token_id": None,
        "use_cache": True,
    }


def _full_attention(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": LAYERS}


def _dense() -> WideRecipe:
    weights = _ends()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights += [*_layer_norms(prefix), *_attention(prefix), *_mlp(f"{prefix}.mlp", INNER)]
    config = _full_attention(_config("Qwen3ForCausalLM", "qwen3"))
    return WideRecipe("dense", 30_001, config, tuple(weights))


def _moe() -> WideRecipe:
    config = _full_attention(_config("Qwen3MoeForCausalLM", "qwen3_moe")) | {
        "moe_intermediate_size": EXPERT_INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    weights = _ends()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights += [*_layer_norms(prefix), *_attention(prefix)]
        weights.append(_linear(f"{prefix}.mlp.gate", EXPERTS, HIDDEN, gain=2.0))
        for expert in range(EXPERTS):
            weights += _mlp(f"{prefix}.mlp.experts.{expert}", EXPERT_INNER)
    return WideRecipe("moe", 30_002, config, tuple(weights))


def _swa() -> WideRecipe:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = _config("MellumForCausalLM", "mellum") | {
        "sliding_window": SLIDING_WINDOW,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
        "mlp_layer_types": ["dense"] * LAYERS,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": EXPERT_INNER,
        "norm_topk_prob": True,
    }
    config.pop("rope_theta")
    weights = _ends()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights += [*_layer_norms(prefix), *_attention(prefix), *_mlp(f"{prefix}.mlp", INNER)]
    return WideRecipe("swa", 30_003, config, tuple(weights))


def _hybrid() -> WideRecipe:
    layer_types = ["conv", "conv", "full_attention"] * (LAYERS // 3)
    config = _config("Lfm2ForCausalLM", "lfm2") | {
        "norm_eps": 1e-6,
        "layer_types": layer_types,
        "conv_L_cache": CONV_WIDTH,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }
    # LFM2 takes the head's size from the width.
    config |= {"num_attention_heads": HIDDEN // HEAD_DIM}
    weights = _ends("model.embedding_norm")
    for layer, layer_type in enumerate(layer_types):
        prefix = f"model.layers.{layer}"
        weights.append(_norm(f"{prefix}.operator_norm", HIDDEN, 1.0))
        weights += _short_conv(prefix) if layer_type == "conv" else _lfm2_attention(prefix)
        weights += [
            _norm(f"{prefix}.ffn_norm", HIDDEN, 1.0),
            _linear(f"{prefix}.feed_forward.w1", INNER, HIDDEN),
            _linear(f"{prefix}.feed_forward.w3", INNER, HIDDEN),
            _linear(f"{prefix}.feed_forward.w2", HIDDEN, INNER, gain=2.0),
        ]
    return WideRecipe("hybrid", 30_004, config, tuple(weights))


def _short_conv(prefix: str) -> list[WeightPlan]:
    return [
        _linear(f"{prefix}.conv.in_proj", 3 * HIDDEN, HIDDEN),
        WeightPlan(f"{prefix}.conv.conv.weight", (HIDDEN, 1, CONV_WIDTH), CONV_WIDTH**-0.5),
        _linear(f"{prefix}.conv.out_proj", HIDDEN, HIDDEN, gain=2.0),
    ]


def _lfm2_attention(prefix: str) -> list[WeightPlan]:
    return [
        _linear(f"{prefix}.self_attn.q_proj", HIDDEN, HIDDEN),
        _linear(f"{prefix}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.out_proj", HIDDEN, HIDDEN, gain=2.0),
        _norm(f"{prefix}.self_attn.q_layernorm", HEAD_DIM, 1.5),
        _norm(f"{prefix}.self_attn.k_layernorm", HEAD_DIM, 1.5),
    ]


def _linear_attention() -> WideRecipe:
    config = _config("Qwen3NextForCausalLM", "qwen3_next") | {
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": LINEAR_CONV_WIDTH,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
        "linear_num_key_heads": LINEAR_HEADS,
        "linear_num_value_heads": LINEAR_HEADS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": LINEAR_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INNER,
        "shared_expert_intermediate_size": EXPERT_INNER,
        "norm_topk_prob": True,
    }
    # Qwen3-Next adds one to its norm weights, but not to those of the gated norm.
    weights = _ends(norm_mean=0.0)
    for layer, layer_type in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        weights += _layer_norms(prefix, 0.0)
        if layer_type == "full_attention":
            weights += _attention(prefix, 0.5, query_heads=2 * HEADS)
        else:
            weights += _delta_net(f"{prefix}.linear_attn")
        weights.append(_linear(f"{prefix}.mlp.gate", LINEAR_EXPERTS, HIDDEN, gain=2.0))
        weights.append(_linear(f"{prefix}.mlp.shared_expert_gate", 1, HIDDEN))
        weights += _mlp(f"{prefix}.mlp.shared_expert", EXPERT_INNER)
        for expert in range(LINEAR_EXPERTS):
            weights += _mlp(f"{prefix}.mlp.experts.{expert}", EXPERT_INNER)
    return WideRecipe(cast(Kind, "linear"), 30_005, config, tuple(weights))


def _delta_net(prefix: str) -> list[WeightPlan]:
    width = LINEAR_HEADS * HEAD_DIM
    return [
        _linear(f"{prefix}.in_proj_qkvz", 4 * width, HIDDEN),
        _linear(f"{prefix}.in_proj_ba", 2 * LINEAR_HEADS, HIDDEN),
        WeightPlan(f"{prefix}.conv1d.weight", (3 * width, 1, LINEAR_CONV_WIDTH), LINEAR_CONV_WIDTH**-0.5),
        WeightPlan(f"{prefix}.dt_bias", (LINEAR_HEADS,), 0.5),
        WeightPlan(f"{prefix}.A_log", (LINEAR_HEADS,), 0.5),
        _norm(f"{prefix}.norm", HEAD_DIM, 1.0),
        _linear(f"{prefix}.out_proj", HIDDEN, width, gain=2.0),
    ]


RECIPES = {
    "dense": _dense,
    "moe": _moe,
    "swa": _swa,
    "hybrid": _hybrid,
    "linear": _linear_attention,
}


def make(name: str, root: Path) -> Path:
    """The folder of a model of the list under `root`, made if it is not there yet."""
    return make_from_recipe(RECIPES[name](), root)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the models of the GPU list.")
    parser.add_argument("root", type=Path)
    parser.add_argument("names", nargs="+", choices=RECIPES)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(len(arguments.names)) as pool:
        for name, folder in zip(
            arguments.names,
            pool.map(make, arguments.names, [arguments.root] * len(arguments.names)),
            strict=True,
        ):
            print(name, folder)


if __name__ == "__main__":
    main()
