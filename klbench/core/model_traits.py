"""What a model's architecture means for exact consistency: operator classes, floors, experts.

Judged by the architecture's name and the server's settings alone: a trait is a reason to look, not a proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SCANS = (
    "Qwen3Next", "Qwen3_5", "KimiLinear", "Mamba", "NemotronH", "FalconH1", "GraniteMoeHybrid", "Bamba",
    "Jamba", "Zamba", "MiniMaxText01", "MiniMaxM1", "BailingMoeLinear", "BailingMoeV2_5",
    "JetNemotron", "RWKV", "Plamo2",
)  # fmt: skip
"""Prefill is a chunked scan and decode a recurrence: two algorithms that round differently."""
_CONVOLUTIONS = ("Lfm2", "Inkling")
"""Short convolutions carry state too, but prefill and decode sum the same few products."""
_EXPERTS = (
    "moe",
    "mixtral",
    "deepseek",
    "kimi",
    "gptoss",
    "dbrx",
    "grok",
    "glm4moe",
    "longcat",
    "ernie4_5_moe",
)
_QUANTISED = ("fp8", "float8", "fp4", "int8", "awq", "gptq", "w8a8", "w4a")


@dataclass(frozen=True, slots=True)
class OperatorClass:
    """How an operator can break consistency and what it needs so as not to."""

    name: str
    examples: str
    needs: str


OPERATOR_CLASSES: tuple[OperatorClass, ...] = (
    OperatorClass(
        "token-wise",
        "projections, norms, rotary embeddings, activations, router, LM head",
        "the same order of summation for a row however many rows share the call",
    ),
    OperatorClass(
        "reducing across tokens",
        "attention",
        "the same split of the keys into tiles for every number of query rows, and the same keys, mask "
        "and window",
    ),
    OperatorClass(
        "carrying state",
        "short convolutions, Mamba, gated delta nets",
        "a state that is handed from prefill to decode, kept, restored and shared without a change; where "
        "a scan "
        "in chunks and a recurrence are two algorithms, the floor is not zero",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """`scan`: prefill and decode are different algorithms; `state`: the cache keeps conv or SSM state."""

    architecture: str | None
    experts: bool
    state: bool
    scan: bool
    quantised_kv: str | None
    quantised_weights: str | None

    @property
    def floor(self) -> str | None:
        """Why this model cannot be expected to reach exactly zero, or None."""
        if self.scan:
            return (
                f"{self.architecture} computes prefill as a scan in chunks and decode as a recurrence: two "
                "algorithms, an ulp apart at best"
            )
        return None


def model_traits(server: Mapping[str, Any]) -> ModelTraits:
    """The traits that the `server` object of klbench.run/1 tells."""
    names = [str(name) for name in server.get("architectures") or ()]
    scan = next((name for name in names if any(known in name for known in _SCANS)), None)
    state = scan or next((name for name in names if any(known in name for known in _CONVOLUTIONS)), None)
    experts = any(known in name.lower().replace("_", "") for name in names for known in _EXPERTS)
    return ModelTraits(
        architecture=scan or state or (names[0] if names else None),
        experts=experts,
        state=state is not None,
        scan=scan is not None,
        quantised_kv=_quantised(server.get("kv_cache_dtype")),
        quantised_weights=_quantised(server.get("quantization")),
    )


def _quantised(value: object) -> str | None:
    text = str(value or "").lower()
    return text if any(word in text for word in _QUANTISED) else None


def operator_class(module: str, class_name: str = "") -> OperatorClass | None:
    """The class of a module by its path or its class, None where neither tells."""
    last = module.rsplit(".", 1)[-1].lower()
    kind = class_name.lower()
    if any(word in kind or word in last for word in ("mamba", "conv", "deltanet", "gdn", "ssm", "lightning")):
        return OPERATOR_CLASSES[2]
    if last in ("attn", "attention", "self_attn") or "attention" in kind:
        return OPERATOR_CLASSES[1]
    token_wise = (
        "proj",
        "norm",
        "act",
        "gate",
        "router",
        "experts",
        "mlp",
        "lm_head",
        "emb",
        "logits",
        "fc",
    )
    if any(word in last for word in token_wise):
        return OPERATOR_CLASSES[0]
    return None
