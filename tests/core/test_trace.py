"""What an operator's path says of its place."""

import pytest

from klbench.core.comparison import is_embedding
from klbench.core.trace import Operator


def operator(module: str, class_name: str = "Module") -> Operator:
    return Operator(module, class_name, call=0, order=0, container=False, state=None)


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("model.layers.12.self_attn.attn", 12),
        ("model.language_model.layers.0", 0),
        ("transformer.h.3.attn", 3),
        ("blocks.7.norm", 7),
        ("model.norm", None),
        ("model.layers", None),
        ("", None),
        ("model.experts.4.up", None),
    ],
)
def test_the_layer_is_the_number_behind_the_word_for_layers(module: str, layer: int | None) -> None:
    assert operator(module).layer == layer


@pytest.mark.parametrize(
    ("module", "class_name", "expected"),
    [
        ("model.embed_tokens", "VocabParallelEmbedding", True),
        ("model.embed_tokens", "Gemma3TextScaledWordEmbedding", True),
        ("transformer.wte", "Anything", True),
        ("model.layers.0.self_attn.rotary_emb", "RotaryEmbedding", False),
        ("model.layers.0.mlp", "MLP", False),
    ],
)
def test_the_embedding_of_tokens_is_no_rotary_embedding(module: str, class_name: str, expected: bool) -> None:
    assert is_embedding(operator(module, class_name)) is expected
