"""What a Python has of sglang, told by that Python itself: one JSON line behind a marker on stdout.

klbench runs this text with `python -c`, so that names are found as `python -m sglang.launch_server` finds
them. Without arguments nothing heavy is imported; with `flags` sglang's argument parser is built, which takes
seconds, and every option that it knows is listed with its choices.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from typing import Any, Dict, Optional

MARK = "klbench-probe:"


def _version(name: str) -> Optional[str]:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin(name: str) -> Optional[str]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin and spec.origin != "namespace":
        return spec.origin
    places = list(spec.submodule_search_locations or [])
    return os.path.join(places[0], "__init__.py") if places else None


def _torch_cuda(origin: Optional[str]) -> Optional[str]:
    """The CUDA version that torch was built for, from its version file: importing torch takes seconds."""
    if origin is None:
        return None
    try:
        with open(os.path.join(os.path.dirname(origin), "version.py"), encoding="utf-8") as file:
            found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", file.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _wanted(package: str, other: str) -> Optional[str]:
    """The version of `other` that `package` asks for ("==2.11.0"), None where it does not say."""
    try:
        requirements = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in requirements:
        requirement, _, marker = line.partition(";")
        found = re.match(r"\s*([A-Za-z0-9._-]+)\s*\(?([^)]*)\)?", requirement)
        if found and found.group(1).lower() == other and "extra" not in marker and found.group(2).strip():
            return found.group(2).strip()
    return None


def describe() -> Dict[str, Any]:
    """Python, sglang and torch as they would be imported here; null for what is not there."""
    sglang, torch = _origin("sglang"), _origin("torch")
    return {
        "executable": sys.executable,
        "python": ".".join(map(str, sys.version_info[:3])),
        "sglang": sglang,
        "sglang_version": _version("sglang"),
        "torch": torch,
        "torch_version": _version("torch"),
        "torch_cuda": _torch_cuda(torch),
        "wants_torch": _wanted("sglang", "torch"),
    }


def flags() -> Dict[str, Any]:
    """Every option of this sglang's launcher, with its choices (null where anything goes)."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {
        option: None if action.choices is None else [str(choice) for choice in action.choices]
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


if __name__ == "__main__":
    answer = describe()
    if sys.argv[1:] == ["flags"]:
        answer["flags"] = flags()
    print(MARK + json.dumps(answer), flush=True)
