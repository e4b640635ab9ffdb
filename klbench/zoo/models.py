"""Makes a model of the zoo on disk, once per recipe.

The folder appears complete or not at all: it is written beside its place and renamed into it, so two
processes may ask for the same model at the same time and a killed one leaves no half model behind.
"""

import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import platformdirs

from klbench.zoo.architectures import Kind, Recipe, WeightPlan, recipe
from klbench.zoo.tokenizer import plain_token_ids

# How far the head rows of tokens that are no plain text are damped, so that they are rarely the likeliest.
_ODD_TOKEN_SCALE = 0.25


def zoo_root() -> Path:
    """Where the zoo's models live: under `KLBENCH_CACHE` where it is set, else the user's cache folder."""
    cache = os.environ.get("KLBENCH_CACHE")
    return (Path(cache) if cache else Path(platformdirs.user_cache_dir("klbench"))) / "zoo"


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of finite float32 values rounded to bfloat16, to nearest and ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype("<u2")


def _draw(plan: WeightPlan, random: np.random.Generator) -> npt.NDArray[np.float32]:
    values = random.standard_normal(plan.shape, dtype=np.float32) * np.float32(plan.spread)
    values += np.float32(plan.mean)
    if plan.vocabulary_rows:
        scale = np.full(plan.shape[0], _ODD_TOKEN_SCALE, dtype=np.float32)
        scale[list(plain_token_ids())] = 1.0
        values *= scale[:, None]
    return values


def _write(model: Recipe, folder: Path) -> None:
    for name, content in model.files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
    _write_safetensors(model, folder / "model.safetensors")


def _write_safetensors(model: Recipe, path: Path) -> None:
    """Writes header length, header and tensors; numpy has no bfloat16, so safetensors.numpy cannot."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in model.weights:
        start, end = end, end + 2 * math.prod(plan.shape)
        header[plan.name] = {"dtype": "BF16", "shape": list(plan.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    random = np.random.Generator(np.random.PCG64(model.seed))
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for plan in model.weights:
            file.write(bfloat16_bits(_draw(plan, random)).tobytes())


def make_model(kind: Kind, root: Path, *, on_gpu: bool = False) -> Path:
    """The folder of a zoo model under `root`, made if it is not there yet."""
    return make_from_recipe(recipe(kind, on_gpu=on_gpu), root)


def make_from_recipe(model: Recipe, root: Path) -> Path:
    """The folder of any recipe's model under `root`, made if it is not there yet."""
    folder = root / f"{model.kind}-{model.key}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    try:
        _write(model, draft)
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            # Another process was first; its folder is complete, for it was renamed as well.
            if not folder.is_dir():
                raise
    finally:
        if draft.exists():
            shutil.rmtree(draft)
    return folder
