"""A server's own dumper: what is asked of it, what it must have been started with, and when it is refused."""

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from klbench.engine import dumper_control
from klbench.engine.capture_control import RequestIds
from klbench.engine.dumper_control import find_dumper, layer_windows, own_address
from klbench.engine.path_map import PathMap, read_path_map
from klbench.errors import ServerError, UndecidedError

NONCE = "a1b2"


class Client:
    """A server with a dumper whose files arrive in `seen`, or nowhere."""

    url = "http://127.0.0.1:30000"

    def __init__(self, seen: Path | None = None, **config: Any) -> None:
        self.config = {"non_intrusive_mode": "all", "enable": False, "exp_name": None} | config
        self.asked: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.seen = seen

    async def dumper(self, method: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        if method == "get_state":
            return [{"config": self.config, "step": 0, "dump_index": 0}]
        self.asked.append(dict(body or {}))
        self.config |= body or {}
        return [{}]

    async def generate_one_each(self, rids: list[str]) -> None:
        self.ids += rids
        if self.seen is not None and self.config["enable"]:
            place = self.seen / str(self.config["exp_name"])
            place.mkdir(parents=True, exist_ok=True)
            (place / "step=0___rank=0___dump_index=1___name=rids___.pt").write_bytes(b"")


async def opened(client: Client, folder: Path, paths: PathMap | None = None, **more: Any) -> Any:
    control = await find_dumper(client, RequestIds(NONCE), paths or PathMap(), {2: 64})  # type: ignore[arg-type]
    assert control is not None
    await control.open(folder, **({"free_floor_bytes": 0, "size_cap_bytes": 1 << 40} | more))
    return control


async def test_each_capture_has_a_name_of_its_own_behind_a_proof_that_arrived(tmp_path: Path) -> None:
    client = Client(tmp_path)
    for _ in range(2):
        control = await opened(client, tmp_path)
        await control.close()

    enabled = [asked for asked in client.asked if asked["enable"]]
    names = [asked["exp_name"] for asked in enabled]
    assert len(set(names)) == 4
    assert all(NONCE in name for name in names)
    assert [asked["filter"] for asked in enabled] == ["name == 'rids'", None] * 2
    assert client.asked[-1] == {"enable": False}
    # What proved the folder is gone; what the reader needs to know lies there.
    assert os.listdir(tmp_path) == ["stock.json"]
    about = json.loads((tmp_path / "stock.json").read_text())
    assert about == {"nonce": NONCE, "exp_names": [names[-1]], "windows": {"2": 64}}


async def test_the_server_is_told_its_own_path_and_a_quoted_pattern(tmp_path: Path) -> None:
    client = Client(tmp_path)
    control = await opened(
        client, tmp_path, read_path_map([f"/in/container={tmp_path}"]), pattern="a'] or name or ['"
    )
    await control.close()
    enabled = [asked for asked in client.asked if asked["enable"]]
    assert {asked["dir"] for asked in enabled} == {"/in/container"}
    tags = {"name": "b", "search": lambda pattern, name: pattern == name}
    assert not eval(enabled[-1]["filter"], {"__builtins__": {}}, tags)
    assert eval(enabled[-1]["filter"], {"__builtins__": {}}, tags | {"name": "positions"})


async def test_files_that_do_not_arrive_are_an_error_that_names_both_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumper_control, "_SEEN_LIMIT_S", 0.0)
    client = Client(None)
    with pytest.raises(UndecidedError) as caught:
        await opened(client, tmp_path, read_path_map([f"/in/container={tmp_path}"]))
    assert "/in/container is not in" in caught.value.what
    assert "--path-map" in caught.value.next
    assert client.config["enable"] is False


async def test_a_dumper_without_hooks_or_in_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UndecidedError) as caught:
        await opened(Client(tmp_path, non_intrusive_mode="core"), tmp_path)
    assert "DUMPER_NON_INTRUSIVE_MODE=all" in caught.value.next
    with pytest.raises(UndecidedError, match="in use") as caught:
        await opened(Client(tmp_path, enable=True, exp_name="theirs"), tmp_path)
    assert """127.0.0.1:30000/dumper/configure -d '{"enable": false}'""" in caught.value.next


async def test_a_switch_that_does_not_answer_is_an_error_of_ours_with_the_way_out(tmp_path: Path) -> None:
    client = Client(tmp_path)
    control = await opened(client, tmp_path)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stuck(_method: str, _body: Any = None) -> Any:
        await never

    client.dumper = stuck  # type: ignore[method-assign]
    with pytest.raises(UndecidedError, match="not switched off") as caught:
        await control.close(limit_s=0.01)
    assert "/dumper/configure" in caught.value.next


async def test_a_capture_that_could_not_be_opened_is_switched_off_again(tmp_path: Path) -> None:
    client = Client(tmp_path)
    real = client.dumper

    async def gone(method: str, body: dict[str, Any] | None = None) -> Any:
        if body and body["enable"] and body["filter"] is None:
            raise ServerError("it did not answer within 60 s")
        return await real(method, body)

    client.dumper = gone  # type: ignore[method-assign]
    with pytest.raises(ServerError):
        await opened(client, tmp_path)
    assert client.asked[-1] == {"enable": False}


async def test_digests_are_not_to_be_had_from_it(tmp_path: Path) -> None:
    with pytest.raises(UndecidedError, match="no digests"):
        await opened(Client(tmp_path), tmp_path, backend="digest")


async def test_a_disk_that_fills_cuts_the_capture_and_says_so(tmp_path: Path) -> None:
    client = Client(tmp_path)
    control = await opened(client, tmp_path, free_floor_bytes=1 << 60)
    assert control._watch is not None
    await control._watch
    await control.close()
    assert "less than the floor" in str(control.invalid(tmp_path))
    assert client.config["enable"] is False


async def test_a_capture_that_wrote_nothing_is_invalid(tmp_path: Path) -> None:
    control = await opened(Client(tmp_path), tmp_path)
    await control.close()
    assert "wrote nothing" in str(control.invalid(tmp_path))


def test_windows_are_those_of_the_layers_that_slide() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert layer_windows({"text_config": {"sliding_window": 64, "layer_types": kinds}}) == {0: 63, 2: 63}
    assert layer_windows({"sliding_window": None, "layer_types": kinds}) == {}
    assert layer_windows({"sliding_window": 64}) == {}


def test_a_machine_without_an_address_of_its_own_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*_: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_route, raising=False)
    monkeypatch.setattr(dumper_control.socket, "gethostbyname", lambda _name: "127.0.0.1")
    assert own_address() is None
    monkeypatch.setattr(dumper_control.socket, "gethostbyname", lambda _name: "127.0.0.2")
    assert own_address() == "127.0.0.2"
