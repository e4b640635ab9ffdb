"""What is really in force on a server: the `server` object of klbench.run/1, and where it differs from what
was asked for.

Read from the server itself (/server_info, /model_info) and, for a server of ours, from its Python, its log
and its model's config.json. What nobody told stays None; nothing is assumed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klbench.engine.checkout import run_git
from klbench.engine.gpu import Gpu
from klbench.engine.path_map import SAME_PATHS, PathMap
from klbench.engine.server_python import ServerPython

_LARGEST_CONFIG_BYTES = 16 << 20

# Variables that change results without a flag; `NVIDIA_TF32_OVERRIDE` and the like included.
_NUMERICS_PREFIXES = (
    "SGLANG_BATCH_INVARIANT",
    "SGLANG_ENABLE_DETERMINISTIC",
    "SGLANG_FLASHINFER",
    "SGLANG_TRITON",
    "SGLANG_USE_AITER",
    "SGLANG_USE_CPU_ENGINE",
    "SGLANG_DEEPEP",
    "SGLANG_ENABLE_JIT_DEEPGEMM",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    "CUBLAS_",
    "CUDNN_",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32",
    "TRITON_",
    "FLASHINFER_",
    "OMP_NUM_THREADS",
    "MKL_CBWR",
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server as it runs. The fields up to `numerics_env` are the contract of klbench.run/1."""

    sglang_version: str | None = None
    sglang_path: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    model: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    device: str | None = None
    attention_backend: str | None = None
    deterministic: bool | None = None
    radix_cache: bool | None = None
    page_size: int | None = None
    chunked_prefill_size: int | None = None
    tp_size: int | None = None
    dp_size: int | None = None
    pp_size: int | None = None
    nnodes: int | None = None
    cuda_graphs: bool | None = None
    overlap: bool | None = None
    speculative: str | None = None
    numerics_env: Mapping[str, str] | None = None
    # Beyond the contract: what the helpers and the diagnosis need to know.
    dp_attention: bool | None = None
    sliding_window: int | None = None
    conv_width: int | None = None
    """Of a model whose layers keep a short convolution's state."""
    checkpoint_interval: int | None = None
    """Tokens between two checkpoints of recurrent state that decode keeps; None for a model without one."""
    vocab_size: int | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    decode_log_interval: int | None = None
    disaggregation: str | None = None
    preferred_sampling_params: Mapping[str, Any] | None = None
    architectures: tuple[str, ...] = ()
    tokenizer: bool | None = None
    python: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The `server` object."""
        content = asdict(self)
        return content | {"gpus": list(self.gpus), "architectures": list(self.architectures)}

    @property
    def all_model_processes(self) -> int:
        """How many processes hold a part of the model, on all nodes."""
        # The ranks of data-parallel attention are ranks of one tensor-parallel world.
        replicas = 1 if self.dp_attention else self.dp_size or 1
        return (self.tp_size or 1) * (self.pp_size or 1) * replicas

    @property
    def model_processes(self) -> int:
        """How many processes of each node hold a part of the model."""
        return self.all_model_processes // (self.nnodes or 1)


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _inverted(value: object) -> bool | None:
    return not value if isinstance(value, bool) else None


def _cuda_graphs(info: Mapping[str, Any]) -> bool | None:
    """Whether any forward is replayed from a graph; newer servers resolve it per phase."""
    if info.get("disable_cuda_graph") is True or info.get("device") == "cpu":
        return False
    config = info.get("cuda_graph_config")
    if isinstance(config, dict):
        backends = [phase.get("backend") for phase in config.values() if isinstance(phase, dict)]
        if backends:
            return any(backend not in (None, "disabled") for backend in backends)
    return _inverted(info.get("disable_cuda_graph"))


def _sampling_params(value: object) -> Mapping[str, Any] | None:
    """preferred_sampling_params, which older servers keep as JSON text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if isinstance(value, dict) and value else None


def read_facts(
    info: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    python: ServerPython | None = None,
    git: tuple[str, bool] | None = None,
    gpus: Sequence[Gpu] = (),
    kv_dtype: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerFacts:
    """The facts in the server's two answers and in what is known about a server of ours."""
    config = config or {}
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**text_config, **config}
    dtype = _text(info.get("dtype"))
    if dtype in (None, "auto"):
        dtype = _text(config.get("dtype")) or _text(config.get("torch_dtype")) or dtype
    kv_cache_dtype = kv_dtype or _text(info.get("kv_cache_dtype"))
    architectures = model.get("architectures")
    disaggregation = _text(info.get("disaggregation_mode"))
    attention = _text(info.get("attention_backend"))
    split = [_text(info.get(f"{phase}_attention_backend")) for phase in ("prefill", "decode")]
    if any(split):
        attention = "prefill {}, decode {}".format(*(backend or attention for backend in split))
    numerics = None
    if environment is not None:
        numerics = {
            name: value for name, value in sorted(environment.items()) if name.startswith(_NUMERICS_PREFIXES)
        }
    on_cuda = info.get("device") == "cuda"
    return ServerFacts(
        sglang_version=_text(info.get("version")) or (python.sglang_version if python else None),
        sglang_path=str(python.sglang_path) if python else None,
        git_commit=git[0] if git else None,
        git_dirty=git[1] if git else None,
        torch=python.torch_version if python else None,
        cuda=python.torch_cuda if python else None,
        driver=gpus[0].driver if gpus and on_cuda else None,
        gpus=tuple(gpu.name for gpu in gpus) if on_cuda else (),
        model=_text(model.get("model_path")) or _text(info.get("model_path")),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        quantization=_text(info.get("quantization")),
        device=_text(info.get("device")),
        attention_backend=attention,
        deterministic=_bool(info.get("enable_deterministic_inference")),
        radix_cache=_inverted(info.get("disable_radix_cache")),
        page_size=_int(info.get("page_size")),
        chunked_prefill_size=_int(info.get("chunked_prefill_size")),
        tp_size=_int(info.get("tp_size")),
        dp_size=_int(info.get("dp_size")),
        pp_size=_int(info.get("pp_size")),
        nnodes=_int(info.get("nnodes")),
        cuda_graphs=_cuda_graphs(info),
        overlap=_inverted(info.get("disable_overlap_schedule")),
        speculative=_text(info.get("speculative_algorithm")),
        numerics_env=numerics,
        dp_attention=_bool(info.get("enable_dp_attention")),
        sliding_window=_window(config),
        conv_width=_first_int(config, _CONV_WIDTHS),
        checkpoint_interval=(
            _int(info.get("mamba_track_interval")) if _first_int(config, _CONV_WIDTHS) is not None else None
        ),
        vocab_size=_int(config.get("vocab_size")),
        context_length=_int(info.get("context_length")) or _int(config.get("max_position_embeddings")),
        max_total_tokens=_int(info.get("max_total_num_tokens")),
        decode_log_interval=_int(info.get("decode_log_interval")),
        disaggregation=None if disaggregation in (None, "null") else disaggregation,
        preferred_sampling_params=_sampling_params(
            model.get("preferred_sampling_params") or info.get("preferred_sampling_params")
        ),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        tokenizer=_inverted(info.get("skip_tokenizer_init")),
        python=str(python.path) if python else None,
    )


_CONV_WIDTHS = ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "d_conv")
"""What models call the width of their short convolutions."""


def _first_int(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((value for name in names if (value := _int(config.get(name))) is not None), None)


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window in tokens, if the model uses one."""
    if config.get("use_sliding_window") is False:
        return None
    return _int(config.get("sliding_window"))


def read_model_config(model_path: str | None, paths: PathMap = SAME_PATHS) -> Mapping[str, Any] | None:
    """The model's config.json where the server's path of it is a folder that we can read, as `paths` lead."""
    if model_path is None:
        return None
    path = paths.here(model_path) / "config.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= _LARGEST_CONFIG_BYTES:
            content = json.loads(path.read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else None
    return None


async def git_state(package: Path) -> tuple[str, bool] | None:
    """(commit, dirty) of the checkout that the package's files are tracked in; None for an installed one."""
    # A package in a virtual environment may lie inside a repository that does not track it.
    if await run_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = await run_git(package, "rev-parse", "HEAD")
    status = await run_git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    if commit is None or status is None:
        return None
    return commit.strip(), bool(status.strip())


def compare_with_asked(arguments: Sequence[str], info: Mapping[str, Any]) -> list[dict[str, str]]:
    """Where the server runs otherwise than its arguments asked: [{"asked", "in_force"}].

    Only options whose name is a setting of the server are judged, and a radix cache that is off unasked.
    """
    asked = parse_arguments(arguments)
    differs = []
    for option, value in asked.items():
        name = option.removeprefix("--").replace("-", "_")
        if name not in info or name in ("model", "port", "host"):
            continue
        in_force = info[name]
        if value is None:
            same = in_force is True
        elif isinstance(in_force, bool):
            same = value.lower() == str(in_force).lower()
        elif isinstance(in_force, int | float):
            same = _number(value) == float(in_force)
        elif isinstance(in_force, str):
            same = value == in_force
        else:
            continue
        if not same:
            differs.append(
                {
                    "asked": option if value is None else f"{option} {value}",
                    "in_force": f"{name} = {in_force}",
                }
            )
    if info.get("disable_radix_cache") is True and "--disable-radix-cache" not in asked:
        differs.append({"asked": "radix cache on (the default)", "in_force": "disable_radix_cache = True"})
    return differs


def parse_arguments(arguments: Sequence[str]) -> dict[str, str | None]:
    """{option: value} of a command line, the last one winning; None for an option without a value."""
    parsed: dict[str, str | None] = {}
    option: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            name, separator, value = argument.partition("=")
            parsed[name] = value if separator else None
            option = None if separator else name
        elif option is not None:
            parsed[option] = argument
            option = None
    return parsed


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
