"""What each model of the zoo is: its configuration and how its weights are drawn.

A recipe is plain data and its hash names the model's folder, so a changed recipe makes a new model and never
reuses an old one. The spreads of the weights are chosen so that logits are neither flat nor one-sided, that
attention looks at some positions more than at others, and that greedy generation does not repeat one token.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from klbench.zoo.tokenizer import END_OF_TEXT_ID, VOCAB_SIZE, tokenizer_config, tokenizer_json

Kind = Literal["dense", "moe", "swa", "hybrid"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CONTEXT_LENGTH = 8192
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
GPU_HEAD_DIM = 128
"""Of the mixture of experts on a GPU: its rotary embedding stores K and V there too, which it cannot for
heads of 32; and with heads of 64 FlashAttention-3 gave decode and prefill other bits."""
LAYERS = 4
SLIDING_WINDOW = 64
CONV_WIDTH = 3

# Raise it when the drawing of weights changes without a change of any number below.
DRAWING = 1


@dataclass(frozen=True)
class WeightPlan:
    """One tensor of the checkpoint: normal around `mean`, with standard deviation `spread`.

    `vocabulary_rows` damps the rows of tokens that are no plain text.
    """

    name: str
    shape: tuple[int, ...]
    spread: float
    mean: float = 0.0
    vocabulary_rows: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a model's files."""

    kind: Kind
    seed: int
    config: dict[str, Any]
    weights: tuple[WeightPlan, ...]

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """The JSON files that stand beside the weights, by name."""
        return {
            "config.json": self.config,
            "generation_config.json": {"eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID},
            "tokenizer.json": tokenizer_json(),
            "tokenizer_config.json": tokenizer_config(CONTEXT_LENGTH),
        }

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that change with anything in the recipe."""
        content = json.dumps([DRAWING, asdict(self), self.files], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


def _linear(name: str, rows: int, columns: int, gain: float = 1.0) -> WeightPlan:
    return WeightPlan(f"{name}.weight", (rows, columns), gain / columns**0.5)


def _norm(name: str, size: int, mean: float) -> WeightPlan:
    return WeightPlan(f"{name}.weight", (size,), 0.05, mean)


def _attention(
    prefix: str,
    norm_mean: float,
    head_norm_mean: float,
    post_norm_mean: float,
    head_dim: int = HEAD_DIM,
) -> list[WeightPlan]:
    return [
        _norm(f"{prefix}.input_layernorm", HIDDEN, norm_mean),
        _linear(f"{prefix}.self_attn.q_proj", HEADS * head_dim, HIDDEN),
        _linear(f"{prefix}.self_attn.k_proj", KV_HEADS * head_dim, HIDDEN),
        _linear(f"{prefix}.self_attn.v_proj", KV_HEADS * head_dim, HIDDEN),
        _linear(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * head_dim, gain=2.0),
        _norm(f"{prefix}.self_attn.q_norm", head_dim, head_norm_mean),
        _norm(f"{prefix}.self_attn.k_norm", head_dim, head_norm_mean),
        _norm(f"{prefix}.post_attention_layernorm", HIDDEN, post_norm_mean),
    ]


def _mlp(prefix: str, width: int, gain: float = 1.0) -> list[WeightPlan]:
    return [
        _linear(f"{prefix}.gate_proj", width, HIDDEN, gain=gain),
        _linear(f"{prefix}.up_proj", width, HIDDEN, gain=gain),
        _linear(f"{prefix}.down_proj", HIDDEN, width, gain=2.0),
    ]


def _base_config(architecture: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "bos_token_id": None,
        "use_cache": True,
    }


def _qwen3_ends() -> list[WeightPlan]:
    return [
        WeightPlan("model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN), 0.5),
        _norm("model.norm", HIDDEN, 1.0),
        WeightPlan("lm_head.weight", (VOCAB_SIZE, HIDDEN), 0.25, vocabulary_rows=True),
    ]


def _dense() -> Recipe:
    config = _base_config("Qwen3ForCausalLM", "qwen3") | {
        "intermediate_size": 256,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": LAYERS,
    }
    weights = _qwen3_ends()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights += _attention(prefix, norm_mean=1.0, head_norm_mean=1.5, post_norm_mean=1.0)
        weights += _mlp(f"{prefix}.mlp", 256)
    return Recipe("dense", 20_001, config, tuple(weights))


def _moe(head_dim: int = HEAD_DIM) -> Recipe:
    experts = 8
    config = _base_config("Qwen3MoeForCausalLM", "qwen3_moe") | {
        "head_dim": head_dim,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": LAYERS,
    }
    weights = _qwen3_ends()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights += _attention(
            prefix, norm_mean=1.0, head_norm_mean=1.5, post_norm_mean=1.0, head_dim=head_dim
        )
        weights.append(_linear(f"{prefix}.mlp.gate", experts, HIDDEN, gain=2.0))
        for expert in range(experts):
            weights += _mlp(f"{prefix}.mlp.experts.{expert}", 128)
    return Recipe("moe", 20_002, config, tuple(weights))


def _swa() -> Recipe:
    config = _base_config("Gemma3ForCausalLM", "gemma3_text") | {
        "intermediate_size": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": SLIDING_WINDOW,
        # Three windowed layers, then one that sees everything.
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "sliding_window_pattern": LAYERS,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
    }
    # Gemma adds one to every norm weight, multiplies embeddings by the root of the width, and its embeddings
    # are also its head: a small embedding and a large last norm keep the model from echoing its input.
    weights = [
        WeightPlan("model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN), 0.02, vocabulary_rows=True),
        _norm("model.norm", HIDDEN, 11.0),
    ]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights += _attention(prefix, norm_mean=0.0, head_norm_mean=0.5, post_norm_mean=1.0)
        weights += _mlp(f"{prefix}.mlp", 256)
        weights += [
            _norm(f"{prefix}.pre_feedforward_layernorm", HIDDEN, 0.0),
            _norm(f"{prefix}.post_feedforward_layernorm", HIDDEN, 1.0),
        ]
    return Recipe("swa", 20_003, config, tuple(weights))


def _short_conv(prefix: str) -> list[WeightPlan]:
    return [
        _linear(f"{prefix}.conv.in_proj", 3 * HIDDEN, HIDDEN),
        WeightPlan(f"{prefix}.conv.conv.weight", (HIDDEN, 1, CONV_WIDTH), CONV_WIDTH**-0.5),
        _linear(f"{prefix}.conv.out_proj", HIDDEN, HIDDEN, gain=2.0),
    ]


def _lfm2_attention(prefix: str) -> list[WeightPlan]:
    return [
        _linear(f"{prefix}.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.out_proj", HIDDEN, HEADS * HEAD_DIM, gain=2.0),
        _norm(f"{prefix}.self_attn.q_layernorm", HEAD_DIM, 1.5),
        _norm(f"{prefix}.self_attn.k_layernorm", HEAD_DIM, 1.5),
    ]


def _hybrid() -> Recipe:
    # Convolutions at both ends: the first one's state reaches everything, the last one's only the head.
    layer_types = ["conv", "full_attention", "full_attention", "conv"]
    config = _base_config("Lfm2ForCausalLM", "lfm2") | {
        "intermediate_size": 256,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "layer_types": layer_types,
        "conv_L_cache": CONV_WIDTH,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }
    weights = [
        WeightPlan("model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN), 0.5),
        _norm("model.embedding_norm", HIDDEN, 1.0),
        WeightPlan("lm_head.weight", (VOCAB_SIZE, HIDDEN), 0.25, vocabulary_rows=True),
    ]
    for layer, layer_type in enumerate(layer_types):
        prefix = f"model.layers.{layer}"
        weights.append(_norm(f"{prefix}.operator_norm", HIDDEN, 1.0))
        weights += _short_conv(prefix) if layer_type == "conv" else _lfm2_attention(prefix)
        weights += [
            _norm(f"{prefix}.ffn_norm", HIDDEN, 1.0),
            _linear(f"{prefix}.feed_forward.w1", 256, HIDDEN),
            _linear(f"{prefix}.feed_forward.w3", 256, HIDDEN),
            _linear(f"{prefix}.feed_forward.w2", HIDDEN, 256, gain=2.0),
        ]
    return Recipe("hybrid", 20_004, config, tuple(weights))


def layer_kinds(kind: Kind) -> tuple[str, ...]:
    """What each layer of a model is: "full_attention", "sliding_attention" or "conv"."""
    config = recipe(kind).config
    return tuple(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])


def recipe(kind: Kind, *, on_gpu: bool = False) -> Recipe:
    """The recipe of one model of the zoo, for a CPU or a GPU. Raises ValueError for an unknown kind."""
    if kind == "moe" and on_gpu:
        return _moe(GPU_HEAD_DIM)
    makers = {"dense": _dense, "moe": _moe, "swa": _swa, "hybrid": _hybrid}
    if kind not in makers:
        raise ValueError(f"no model {kind!r} in the zoo; there are: {', '.join(KINDS)}")
    return makers[kind]()
