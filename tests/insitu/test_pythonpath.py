"""What reaches the server's Python: our plugin, the stand-in on the CPU, the user's own, and nothing else."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import klbench
from klbench.engine.pythonpath import cpu_launch_flags, make_server_path, plugin_environment


def test_the_plugin_folder_holds_the_plugin_and_its_metadata_only(tmp_path: Path) -> None:
    (folder,) = make_server_path(tmp_path, cpu=False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "klbench_insitu",
        f"klbench_insitu-{klbench.__version__}.dist-info",
    ]
    assert {path.suffix for path in (folder / "klbench_insitu").iterdir()} == {".py"}
    (distribution,) = distributions(path=[str(folder)])
    assert distribution.metadata["Name"] == "klbench_insitu"
    assert distribution.version == klbench.__version__
    (entry,) = distribution.entry_points
    assert (entry.group, entry.name) == ("sglang.srt.plugins", "klbench_insitu")
    listed = distribution.files
    assert listed is not None
    assert all((folder / file).is_file() for file in listed)


def test_the_stand_in_comes_on_the_cpu_only(tmp_path: Path) -> None:
    plugin, stub = make_server_path(tmp_path, cpu=True)
    assert [path.name for path in stub.iterdir()] == ["sgl_kernel"]
    assert not (plugin / "sgl_kernel").exists()
    assert make_server_path(tmp_path, cpu=True) == [plugin, stub]


def test_the_users_environment_stays_whole_behind_ours(tmp_path: Path) -> None:
    base = {
        "PYTHONPATH": "/theirs",
        "SGLANG_PLUGINS": "mine, other",
        "HOME": "/home/me",
        "KLBENCH_FAULT": "old",
    }
    environment = plugin_environment(tmp_path, "n1", cpu=False, fault=None, base_env=base)
    folder, theirs = environment["PYTHONPATH"].split(os.pathsep)
    assert Path(folder).is_relative_to(tmp_path)
    assert theirs == "/theirs"
    assert environment["SGLANG_PLUGINS"] == "mine,other,klbench_insitu"
    assert environment["HOME"] == "/home/me"
    assert environment["KLBENCH_NONCE"] == "n1"
    assert (
        not {"KLBENCH_FAULT", "KLBENCH_CPU_ENGINE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"} & environment.keys()
    )


def test_without_a_list_of_plugins_none_is_made(tmp_path: Path) -> None:
    environment = plugin_environment(tmp_path, "n1", cpu=False, fault=None, base_env={})
    assert "SGLANG_PLUGINS" not in environment
    assert os.pathsep not in environment["PYTHONPATH"]


def test_the_cpu_engine_is_switched_on_for_the_cpu(tmp_path: Path) -> None:
    environment = plugin_environment(
        tmp_path, "n1", cpu=True, fault="restore-key", base_env={"OMP_NUM_THREADS": "3"}, offline=True
    )
    assert environment["SGLANG_USE_CPU_ENGINE"] == environment["KLBENCH_CPU_ENGINE"] == "1"
    assert environment["KLBENCH_FAULT"] == "restore-key"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "torch_native" in cpu_launch_flags()


def test_the_plugin_is_inert_and_light_without_a_control_folder(tmp_path: Path) -> None:
    (folder,) = make_server_path(tmp_path, cpu=False)
    program = (
        "import sys, json; from klbench_insitu.plugin import activate; activate();"
        "from klbench_insitu import faults_catalogue;"
        "print(json.dumps([name for name in ('torch', 'sglang', 'klbench', 'numpy') if name in sys.modules]))"
    )
    environment = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []


def test_a_failing_plugin_leaves_its_traceback(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environment = plugin_environment(
        tmp_path, "n1", cpu=False, fault="o_proj-cols", base_env={"PATH": os.environ["PATH"]}
    )
    program = "from klbench_insitu.plugin import activate; activate()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    (file,) = tmp_path.glob("presence-launcher-x-*.json")
    presence = json.loads(file.read_text())
    assert presence["nonce"] == "n1"
    assert "ValueError: no fault 'o_proj-cols'; there are: o_proj-rows" in presence["error"]


def test_a_control_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    environment = plugin_environment(
        tmp_path, "n1", cpu=False, fault=None, base_env={"PATH": os.environ["PATH"]}
    )
    program = "from klbench_insitu.plugin import activate; activate()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "mode 0700; it is user" in done.stderr
    assert not list(tmp_path.glob("presence-*"))
