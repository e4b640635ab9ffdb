"""What the server's Python finds of ours, and the environment that makes it find and use it.

The server may run under another Python, so nothing of our own site-packages may reach it. A folder of its own
goes in front of the server's PYTHONPATH; it holds the plugin and the metadata by which sglang finds it:

    <target>/plugin/klbench_insitu/                     the files of klbench/insitu
    <target>/plugin/klbench_insitu-0.1.0.dist-info/     METADATA, RECORD, entry_points.txt
    <target>/cpu/sgl_kernel/                            on the CPU only: the stand-in for the GPU's kernels
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import klbench

PLUGIN_NAME = "klbench_insitu"
PLUGIN_GROUP = "sglang.srt.plugins"
_INSITU = Path(klbench.__file__).parent / "insitu"


def make_server_path(target_dir: Path, *, cpu: bool) -> list[Path]:
    """Makes the folders to put in front of the server's PYTHONPATH and returns them in order.

    What an earlier call left in `target_dir` is replaced. `cpu` adds the stand-in for `sgl_kernel`.
    """
    plugin = target_dir / "plugin"
    shutil.rmtree(plugin, ignore_errors=True)
    package = plugin / PLUGIN_NAME
    package.mkdir(parents=True)
    for source in sorted(_INSITU.glob("*.py")):
        shutil.copyfile(source, package / source.name)
    _write_metadata(plugin)
    folders = [plugin]
    if cpu:
        stub = target_dir / "cpu"
        shutil.rmtree(stub, ignore_errors=True)
        shutil.copytree(_INSITU / "cpu_stub", stub, ignore=shutil.ignore_patterns("__pycache__"))
        folders.append(stub)
    return folders


def _write_metadata(plugin: Path) -> None:
    info = plugin / f"{PLUGIN_NAME}-{klbench.__version__}.dist-info"
    info.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {PLUGIN_NAME}\nVersion: {klbench.__version__}\n",
        "entry_points.txt": f"[{PLUGIN_GROUP}]\n{PLUGIN_NAME} = {PLUGIN_NAME}.plugin:activate\n",
    }
    for name, text in files.items():
        (info / name).write_text(text, encoding="utf-8")
    listed = [path for path in sorted(plugin.rglob("*")) if path.is_file()]
    record = [f"{path.relative_to(plugin).as_posix()},," for path in [*listed, info / "RECORD"]]
    (info / "RECORD").write_text("\n".join(record) + "\n", encoding="utf-8")


def plugin_environment(
    control_dir: Path,
    nonce: str,
    *,
    cpu: bool,
    fault: str | None,
    base_env: Mapping[str, str],
    fault_lab: bool = False,
    server_path: Sequence[Path] | None = None,
    offline: bool = False,
) -> dict[str, str]:
    """The server's whole environment: `base_env`, with our folders in front and our plugin switched on.

    `control_dir` must exist with mode 0700. `server_path` is what `make_server_path` returned; without it the
    folders are made under `control_dir`. `fault` is planted from the start, spelled as in the catalogue;
    `fault_lab` permits faults to be armed at run time. `offline` keeps Hugging Face code from the network;
    only for models that are complete on disk, as the zoo's are.
    """
    folders = make_server_path(control_dir / "pythonpath", cpu=cpu) if server_path is None else server_path
    environment = {name: value for name, value in base_env.items() if name not in _SWITCHES}
    users_path = base_env.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *([users_path] if users_path else [])])
    # sglang reads this as a list of the only plugins to load; unset or empty, it loads all.
    users_plugins = [name.strip() for name in base_env.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if users_plugins and PLUGIN_NAME not in users_plugins:
        environment["SGLANG_PLUGINS"] = ",".join([*users_plugins, PLUGIN_NAME])
    environment["KLBENCH_INSITU_DIR"] = str(control_dir)
    environment["KLBENCH_NONCE"] = nonce
    # By default a health check generates a token, which would show up in captures and in the cache.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if cpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["KLBENCH_CPU_ENGINE"] = "1"
        # On few cores the threads of one tiny operator wait for each other and for sglang's other processes:
        # measured 25 times slower with two threads on two busy cores than with one.
        environment.setdefault("OMP_NUM_THREADS", "1")
    if fault is not None:
        environment["KLBENCH_FAULT"] = fault
    if fault_lab:
        environment["KLBENCH_FAULT_LAB"] = "1"
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


# Ours alone: what a surrounding klbench set for its own server must not reach the next one.
_SWITCHES = frozenset(
    {
        "KLBENCH_INSITU_DIR",
        "KLBENCH_INSITU_OWNER",
        "KLBENCH_NONCE",
        "KLBENCH_CPU_ENGINE",
        "KLBENCH_FAULT",
        "KLBENCH_FAULT_LAB",
    }
)


def cpu_launch_flags(max_total_tokens: int = 65536) -> list[str]:
    """The flags without which sglang does not start, or takes all memory, on a machine without a GPU.

    `max_total_tokens` bounds the KV pool, in tokens.
    """
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        *("--max-total-tokens", str(max_total_tokens)),
        *("--mem-fraction-static", "0.3"),
    ]
