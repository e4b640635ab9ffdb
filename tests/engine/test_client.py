"""The client against a server on loopback that answers what a test tells it to, however wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shlex
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from klbench.engine.client import Keys, Load, ServerClient, is_loopback
from klbench.engine.leave import Leave
from klbench.errors import ServerError, UndecidedError, UsageError

Answer = tuple[int, bytes]


class Scripted:
    """Answers by path (without the query); remembers what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | Callable[[], Answer]] = {}
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.arrived = threading.Event()
        self.hold: threading.Event | None = None
        self.promise_bytes: int | None = None
        script = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                script.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
                script.arrived.set()
                path = self.path.partition("?")[0]
                if script.hold is not None and path == "/generate":
                    script.hold.wait(60)
                answer = script.answers.get(path, (404, b"no such route"))
                status, content = answer() if callable(answer) else answer
                self.send_response(status)
                self.send_header("Content-Length", str(script.promise_bytes or len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.calls: list[tuple[str, str]] = []

    def client(self, **options: Any) -> ServerClient:
        return ServerClient(
            self.url, on_call=lambda line, outcome, _: self.calls.append((line, outcome)), **options
        )

    def says(self, path: str, content: Any, status: int = 200) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.answers[path] = (status, body)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    script = Scripted()
    thread = threading.Thread(target=script.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield script
    if script.hold is not None:
        script.hold.set()
    script.http.shutdown()
    thread.join()
    script.http.server_close()


def answer(rid: str = "r0", **meta: Any) -> dict[str, Any]:
    return {
        "text": "x",
        "output_ids": [7],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": 2,
            "cached_tokens": 0,
            "output_token_logprobs": [[-1.5, 7, None]],
            **meta,
        },
    }


async def test_a_generate_request_has_exactly_the_fields_that_sglangs_helpers_send(
    scripted: Scripted,
) -> None:
    scripted.says("/generate", [answer()])
    async with scripted.client() as client:
        (got,) = await client.generate(
            [[1, 2]], max_new_tokens=1, return_logprob=True, logprob_start_len=-1, rids=["r0"]
        )
    assert scripted.asked[0][2] == {
        "input_ids": [[1, 2]],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "logprob_start_len": -1,
        "rid": ["r0"],
    }
    assert got.output_ids == [7]
    assert got.finish_reason == "length"
    assert got.output_logprobs is not None
    assert got.output_logprobs.nats.tolist() == [-1.5]


async def test_an_error_body_is_shown_and_never_taken_for_data(scripted: Scripted) -> None:
    scripted.says("/generate", [answer()], status=500)
    async with scripted.client() as client:
        with pytest.raises(ServerError, match="status 500") as error:
            await client.generate([[1]], max_new_tokens=1)
    assert "output_ids" in error.value.why


async def test_null_and_nan_logprobs_are_counted_not_invented(scripted: Scripted) -> None:
    good = json.dumps([answer(output_token_logprobs=[["NAN", 7, None], [None, 8, None], [-1.0, 9, None]])])
    scripted.says("/generate", good.replace('"NAN"', "NaN").encode())
    async with scripted.client() as client:
        (got,) = await client.generate([[1]], max_new_tokens=3)
    assert got.output_logprobs is not None
    assert got.output_logprobs.missing == 2
    assert [math.isnan(value) for value in got.output_logprobs.nats] == [True, True, False]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage \xff",
        b"{}",
        b"[]",
        b'[{"meta_info": 3}]',
        b'[{"meta_info": {"output_token_logprobs": [["x", 1, null]]}}]',
        b"[" * 100_000,
    ],
)
async def test_an_answer_of_another_shape_is_an_error_with_words(scripted: Scripted, body: bytes) -> None:
    scripted.says("/generate", body)
    async with scripted.client() as client:
        with pytest.raises(UndecidedError):
            await client.generate([[1]], max_new_tokens=1)


async def test_an_answer_without_end_is_cut_off(scripted: Scripted) -> None:
    scripted.says("/server_info", b" " * (17 << 20))
    async with scripted.client() as client:
        with pytest.raises(UndecidedError, match="larger than 16 MiB"):
            await client.server_info()
    assert scripted.calls[-1][1] == "answer too large"


async def test_a_connection_that_breaks_off_is_an_error_with_words(scripted: Scripted) -> None:
    scripted.says("/generate", [answer()])
    scripted.promise_bytes = 100_000
    async with scripted.client() as client:
        with pytest.raises(ServerError, match="gave no answer"):
            await client.generate([[1]], max_new_tokens=1)


async def test_a_busy_server_is_not_flushed_silently(scripted: Scripted) -> None:
    scripted.says("/flush_cache", b"Flush cache failed.", status=400)
    scripted.says("/v1/loads", {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 4}]})
    async with scripted.client() as client:
        with pytest.raises(ServerError, match=r"3 running, 4 queued") as error:
            await client.flush()
    assert error.value.why == "Flush cache failed."
    assert scripted.asked[0][1] == "/flush_cache?timeout=30"


async def test_the_load_is_what_the_server_counts_and_nothing_else(scripted: Scripted) -> None:
    gauges = {"num_running_reqs": 3, "num_waiting_reqs": 4, "num_used_tokens": 50}
    counted = gauges | {"total_prefill_uncached_tokens": 1000, "decode_moments": [10.0, 30.0, 5.0, 90.0]}
    fresh = gauges | {"total_prefill_uncached_tokens": 8, "decode_moments": None}
    async with scripted.client() as client:
        for ranks, load in (
            ([gauges], Load(3, 4, 50)),
            ([counted, fresh], Load(6, 8, 100, computed_rows=1000 + 30 + 8)),
            ([counted, gauges], Load(6, 8, 100)),
            ([], None),
            (["hostile", {"num_running_reqs": "many", "num_used_tokens": 1e999}], Load(0, 0, 0)),
            ({"no": "list"}, None),
        ):
            scripted.says("/v1/loads", {"loads": ranks})
            assert await client.load() == load
        scripted.says("/v1/loads", b"no", status=403)
        assert await client.load() is None


async def test_older_servers_answer_under_older_names(scripted: Scripted) -> None:
    scripted.says("/get_server_info", {"version": "0.5.17"})
    async with scripted.client() as client:
        assert await client.server_info() == {"version": "0.5.17"}


async def test_what_its_user_did_not_agree_to_is_not_sent(scripted: Scripted) -> None:
    scripted.says("/flush_cache", b"Cache flushed.")
    scripted.says("/generate", [answer()])
    async with scripted.client() as client:
        client.leave = Leave.ASK
        with pytest.raises(UsageError, match="was not agreed to") as error:
            await client.generate([[1]], max_new_tokens=1)
        assert "--yes-flush" in error.value.next
        client.leave = Leave.COMPUTE
        await client.generate([[1]], max_new_tokens=1)
        with pytest.raises(UsageError, match="flushing the cache"):
            await client.flush()
        client.leave = Leave.FLUSH
        await client.flush()
    assert [path.partition("?")[0] for _, path, *_ in scripted.asked] == ["/generate", "/flush_cache"]


async def test_keys_are_sent_and_never_shown(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    monkeypatch.setenv("MY_ADMIN_KEY", "t0psecret")
    scripted.says("/model_info", {})
    scripted.says("/flush_cache", b"ok")
    async with scripted.client(keys=Keys("MY_KEY", "MY_ADMIN_KEY")) as client:
        await client.model_info()
        await client.flush()
    assert [asked[3] for asked in scripted.asked] == ["Bearer s3cret", "Bearer t0psecret"]
    assert [line for line, _ in scripted.calls] == [
        f"curl -s -H \"Authorization: Bearer $MY_KEY\" '{scripted.url}/model_info'",
        f"curl -s -X POST -H \"Authorization: Bearer $MY_ADMIN_KEY\" '{scripted.url}/flush_cache?timeout=30'",
    ]


async def test_a_key_variable_that_is_not_set_is_a_usage_error(scripted: Scripted) -> None:
    async with scripted.client(keys=Keys("KLBENCH_TEST_NO_SUCH_KEY")) as client:
        with pytest.raises(UsageError, match="KLBENCH_TEST_NO_SUCH_KEY is not set"):
            await client.model_info()


async def test_a_refused_key_says_how_to_give_one(scripted: Scripted) -> None:
    scripted.says("/model_info", {"error": "Unauthorized"}, status=401)
    async with scripted.client() as client:
        with pytest.raises(ServerError) as error:
            await client.model_info()
    assert "--api-key-env" in error.value.next


async def test_proxies_are_ignored_on_loopback(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    scripted.says("/model_info", {"model_path": "m"})
    async with scripted.client() as client:
        assert (await client.model_info())["model_path"] == "m"


async def test_a_cancelled_generation_is_aborted_on_the_server(scripted: Scripted) -> None:
    scripted.hold = threading.Event()
    scripted.says("/generate", [answer()])
    scripted.says("/abort_request", {})
    async with scripted.client() as client:
        work = asyncio.create_task(client.generate([[1], [2]], max_new_tokens=1, rids=["a", "b"]))
        assert await asyncio.to_thread(scripted.arrived.wait, 60)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert sorted(body["rid"] for _, path, body, _ in scripted.asked if path == "/abort_request") == [
        "a",
        "b",
    ]
    assert ("cancelled") in [outcome for _, outcome in scripted.calls]


async def test_texts_and_tokens_must_match_one_to_one(scripted: Scripted) -> None:
    scripted.says("/tokenize", {"tokens": [[44], [1, 2]]})
    scripted.says("/detokenize", {"text": ["a"]})
    async with scripted.client() as client:
        assert await client.tokenize([",", "x"]) == [[44], [1, 2]]
        with pytest.raises(ServerError, match="tokenize"):
            await client.tokenize([","])
        assert await client.detokenize([[1]]) == ["a"]
        assert scripted.asked[-1][2]["skip_special_tokens"] is False
        with pytest.raises(ServerError, match="detokenize"):
            await client.detokenize([[1], [2]])


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:30000", "http://", "http://u:p@h"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        ServerClient(url)


def test_loopback_is_recognised() -> None:
    assert is_loopback("http://localhost:1")
    assert is_loopback("http://[::1]:1")
    assert not is_loopback("http://10.0.0.1:1")


async def test_a_long_body_is_kept_in_a_file_so_that_its_call_can_be_repeated(scripted, tmp_path):
    lines, kept = [], []

    def keep(content):
        kept.append(content)
        return tmp_path / "it's.json"

    client = ServerClient(scripted.url, on_call=lambda line, *_: lines.append(line), keep_body=keep)
    with contextlib.suppress(ServerError):
        await client._call("POST", "/generate", {"input_ids": list(range(1000))})
    await client.close()
    assert json.loads(kept[0]) == {"input_ids": list(range(1000))}
    words = shlex.split(lines[-1])
    assert words[words.index("-d") + 1] == f"@{tmp_path}/it's.json"
