"""The byte-level tokenizer of the zoo, written as the JSON that Hugging Face tokenizers reads.

The vocabulary is: 256 bytes, then merges learnt from a short embedded word list (so that generated text
looks like tokens, not like bytes), then three special tokens. Invariants: every byte is a token, so any text
can be encoded; "," is exactly one token; nothing is added around a text, so `encode(",")` has one id; the
ids of special tokens are the last ones.
"""

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

VOCAB_SIZE = 768
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID = VOCAB_SIZE - len(SPECIAL_TOKENS)

# What merges are learnt from: common English words, then those of the trade.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any like my now
over such our man me even most made after also did many before must through years where much your way well
down should because each just those people how too little state good very make world still see own men work
long here get both between life being under never day same another know while last might us great old year
off come since against go came right used take three kernel cache token model prefill decode attention layer
logits probability sample batch chunk page window prefix radix state norm gate expert router request
position sequence forward backward weight bias tensor number value query key head output input embedding
softmax linear scale shift sum mean error exact round float half double integer memory block thread warp
tile grid launch stream event queue server client session trace report
"""


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, as GPT-2 defined it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters: dict[int, str] = {byte: chr(byte) for byte in printable}
    following = 256
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(following)
            following += 1
    return [characters[byte] for byte in range(256)]


def _learn_merges(count: int) -> list[tuple[str, str]]:
    """`count` byte-pair merges learnt from the word list, each word once alone and twice after a space."""
    space = _byte_characters()[32]
    pieces: dict[tuple[str, ...], int] = {}
    for word in dict.fromkeys(_WORDS.split()):
        pieces[tuple(word)] = 1
        pieces[(space, *word)] = 2
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, weight in pieces.items():
            for pair in pairwise(piece):
                pairs[pair] += weight
        # Ties are broken by the text itself, so the result never depends on insertion order.
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        merged: dict[tuple[str, ...], int] = {}
        for piece, weight in pieces.items():
            out: list[str] = []
            at = 0
            while at < len(piece):
                if piece[at : at + 2] == best:
                    out.append(piece[at] + piece[at + 1])
                    at += 2
                else:
                    out.append(piece[at])
                    at += 1
            merged[tuple(out)] = weight
        pieces = merged
    return merges


@cache
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges = _learn_merges(END_OF_TEXT_ID - 256)
    names = [*_byte_characters(), *(left + right for left, right in merges)]
    if len(set(names)) != END_OF_TEXT_ID:
        raise AssertionError("two merges spell the same token")
    return {name: index for index, name in enumerate(names)}, merges


def tokenizer_json() -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    vocabulary, merges = _vocabulary()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": END_OF_TEXT_ID + index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config(context_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; `context_length` in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }


@cache
def plain_token_ids() -> tuple[int, ...]:
    """Ids of the tokens that a prompt or a reader would call text: printable ASCII, no special token."""
    vocabulary, _ = _vocabulary()
    space = _byte_characters()[32]
    return tuple(
        index
        for name, index in vocabulary.items()
        if (text := name.replace(space, " ")).isascii() and text.isprintable()
    )
