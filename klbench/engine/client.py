"""Speaks HTTP to one sglang server: the few routes that the helpers need, and nothing is believed unchecked.

    async with ServerClient("http://127.0.0.1:30000", on_call=log) as client:
        await client.flush()
        results = await client.generate(prompts, max_new_tokens=512, return_logprob=True)

Every call is reported to `on_call` as a curl line that can be copied and repeated; keys never appear in it.
A body that comes with an error status is shown as the server's own words and never taken for data.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from klbench.engine.address import server_address
from klbench.engine.answers import AnswerStream, Generated
from klbench.engine.leave import Leave
from klbench.errors import ServerError, UndecidedError, UsageError

OnCall = Callable[[str, str, float], None]
"""Gets (line, outcome, elapsed_s) of each call."""
KeepBody = Callable[[bytes], Path | None]
"""Keeps a request's body; the file that holds it, None where it is not kept."""

_CONNECT_S = 10.0
_SHORT_S = 60.0
_SHOWN_CHARACTERS = 2000
_SHOWN_BODY_CHARACTERS = 300
_SMALL_ANSWER_BYTES = 16 << 20
_PREFILLED, _DECODED = "total_prefill_uncached_tokens", "decode_moments"
_ENTRY_BYTES = 128
"""More than one logprob entry of an answer takes: `[-12.377435684204102, 151935, null], `, and its text."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the environment variables that hold the server's keys, and keys given by the launch itself."""

    api_key_env: str | None = None
    admin_api_key_env: str | None = None
    launched_with: str | None = None
    """The --api-key that we started the server with."""
    launched_with_admin: str | None = None
    """The --admin-api-key that we started the server with."""

    def bearer(self, admin: bool) -> str | None:
        """The key to send. Raises UsageError if a named variable is not set."""
        name = self.admin_api_key_env if admin and self.admin_api_key_env else self.api_key_env
        if name is None:
            return (self.launched_with_admin if admin else None) or self.launched_with
        value = os.environ.get(name)
        if not value:
            raise UsageError(
                f"the environment variable {name} is not set", next="put the server's key into it"
            )
        return value

    def shown(self, admin: bool) -> str | None:
        """How the header is written in a line that may be copied."""
        name = self.admin_api_key_env if admin and self.admin_api_key_env else self.api_key_env
        if name is not None:
            return f'-H "Authorization: Bearer ${name}"'
        known = self.launched_with or self.launched_with_admin
        return '-H "Authorization: Bearer $API_KEY"' if known else None


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is: summed over its ranks, as far as it says."""

    running: int
    queued: int
    used_tokens: int
    computed_rows: int | None = None
    """Rows of all forwards since it started, but for some decode steps; None where it counts none."""


def _unheard(*_: object) -> None:
    """Stands for a caller that does not listen."""


def is_loopback(url: str) -> bool:
    """Whether `url` stays on this machine: no proxy belongs in between."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class ServerClient:
    """One server's client; use it from one event loop."""

    def __init__(
        self,
        url: str,
        *,
        keys: Keys | None = None,
        on_call: OnCall | None = None,
        keep_body: KeepBody | None = None,
    ) -> None:
        parts = server_address(url)
        if parts.username or parts.password:
            raise UsageError("an address must not hold a password", next="name the key with --api-key-env")
        self.url = url.rstrip("/")
        self._keys = keys or Keys()
        self._on_call = on_call or _unheard
        self._keep_body = keep_body
        self.leave = Leave.FLUSH
        self.answer_bytes = 0
        """So many have come of the answers to `generate`."""
        # Generating takes as long as it takes; everything else sets its own limit.
        timeout = httpx.Timeout(None, connect=_CONNECT_S, pool=None)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=timeout,
            trust_env=not is_loopback(self.url),
            limits=httpx.Limits(max_connections=64),
            follow_redirects=False,
        )

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # The transport.

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        limit_s: float | None = _SHORT_S,
        largest_bytes: int = _SMALL_ANSWER_BYTES,
        admin: bool = False,
        quiet: bool = False,
        take: Callable[[bytes], None] | None = None,
    ) -> tuple[int, bytes | bytearray]:
        """The status and the whole body, at most `largest_bytes`. Raises ServerError without an answer.

        `take` gets the body of a success part by part, which is then not kept here.
        """
        started = time.monotonic()
        headers = {}
        if (key := self._keys.bearer(admin)) is not None:
            headers["Authorization"] = f"Bearer {key}"
        content = None
        if body is not None:
            content = json.dumps(body, separators=(",", ":")).encode()
            headers["Content-Type"] = "application/json"
        outcome = "no answer"
        try:
            async with asyncio.timeout(limit_s):
                request = self._http.stream(method, path, content=content, headers=headers)
                async with request as response:
                    answer, size_bytes = bytearray(), 0
                    keep = answer.extend if take is None or response.status_code != 200 else take
                    async for part in response.aiter_bytes():
                        size_bytes += len(part)
                        if size_bytes > largest_bytes:
                            outcome = "answer too large"
                            raise UndecidedError(
                                f"the server's answer to {path} is larger than {largest_bytes >> 20} MiB",
                                why="no answer of that size was asked for",
                            )
                        keep(part)
                    outcome = f"{response.status_code}, {size_bytes} bytes"
                    return response.status_code, answer
        except TimeoutError:
            outcome = f"no answer within {limit_s:.0f} s"
            raise ServerError(
                f"{self.url}{path} did not answer within {limit_s:.0f} s",
                why="the server may be busy or stuck",
                next="look at the server's log",
            ) from None
        except httpx.HTTPError as error:
            outcome = f"{type(error).__name__}"
            raise ServerError(
                f"{self.url}{path} gave no answer",
                why=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
                next="check that the server is running and that the address is right",
            ) from None
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            if not quiet:
                self._on_call(self._curl(method, path, content, admin), outcome, time.monotonic() - started)

    def _curl(self, method: str, path: str, content: bytes | None, admin: bool) -> str:
        parts = ["curl -s"]
        if method != "GET":
            parts.append(f"-X {method}")
        if (header := self._keys.shown(admin)) is not None:
            parts.append(header)
        if content is not None:
            parts.append("-H 'Content-Type: application/json'")
            parts.append(f"-d {self._body_word(content)}")
        parts.append(f"'{self.url}{path}'")
        return " ".join(parts)

    def _body_word(self, content: bytes) -> str:
        """The body as a word of a shell: itself, or the file that holds it where it is long."""
        more = len(content) - _SHOWN_BODY_CHARACTERS
        kept = self._keep_body(content) if more > 0 and self._keep_body is not None else None
        if kept is not None:
            return "@" + shlex.quote(str(kept))
        text = content[:_SHOWN_BODY_CHARACTERS].decode("utf-8", errors="replace").replace("'", "'\\''")
        return f"'{text}{f'... ({more} bytes more)' if more > 0 else ''}'"

    def _refusal(self, path: str, status: int, body: bytes | bytearray) -> ServerError:
        words = body[:_SHOWN_CHARACTERS].decode("utf-8", errors="replace").strip()
        advice = "look at the server's log"
        if status in (401, 403):
            advice = "name the variables that hold the server's keys: --api-key-env, --admin-api-key-env"
        elif status == 404:
            advice = "check that the address is a sglang server, not a router or another program"
        return ServerError(f"the server refused {path} with status {status}", why=words, next=advice)

    async def _json(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        status, answer = await self._call(method, path, body, **options)
        if status != 200:
            raise self._refusal(path, status, answer)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"the server's answer to {path} is no JSON",
                why=str(error),
                next="check that the address is a sglang server, not a router or another program",
            ) from None

    async def _object(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        answer = await self._json(method, path, body, **options)
        if not isinstance(answer, dict):
            raise ServerError(f"the server's answer to {path} is no JSON object")
        return answer

    # Questions.

    async def is_up(self) -> bool:
        """Whether the server says that it is ready. Never raises for a server that is not there yet."""
        with contextlib.suppress(ServerError):
            status, _ = await self._call("GET", "/health", limit_s=5, quiet=True)
            return status == 200
        return False

    async def server_info(self) -> dict[str, Any]:
        """The resolved settings; older servers have them under another name."""
        try:
            return await self._object("GET", "/server_info")
        except ServerError as error:
            if "status 404" not in error.what:
                raise
        return await self._object("GET", "/get_server_info")

    async def model_info(self) -> dict[str, Any]:
        """The model's own facts; older servers have them under another name."""
        try:
            return await self._object("GET", "/model_info")
        except ServerError as error:
            if "status 404" not in error.what:
                raise
        return await self._object("GET", "/get_model_info")

    async def load(self, *, quiet: bool = True) -> Load | None:
        """How busy the server is, or None where it does not say."""
        try:
            answer = await self._object("GET", "/v1/loads", quiet=quiet)
        except (ServerError, UndecidedError):
            return None
        listed = answer.get("loads")
        ranks = [rank for rank in listed if isinstance(rank, dict)] if isinstance(listed, list) else []
        if not ranks:
            return None

        def total(values: Iterable[Any]) -> int:
            return sum(int(value) for value in values if isinstance(value, int | float) and isfinite(value))

        running, queued, used, prefilled = (
            total(rank.get(name) for rank in ranks)
            for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", _PREFILLED)
        )
        if not all(_PREFILLED in rank and _DECODED in rank for rank in ranks):
            return Load(running, queued, used)
        # Sums over its decode steps: how many, their rows, ...
        moments = [rank[_DECODED] for rank in ranks]
        decoded = total(sums[1] for sums in moments if isinstance(sums, list) and len(sums) > 1)
        return Load(running, queued, used, prefilled + decoded)

    async def flush(self, *, wait_s: float = 30) -> None:
        """Empties the cache; the server waits up to `wait_s` for what is still running.

        Raises ServerError when it was not flushed, with the number of running and queued requests.
        """
        self.leave.check(Leave.FLUSH, f"flushing the cache of {self.url}")
        path = f"/flush_cache?timeout={wait_s:g}"
        status, body = await self._call("POST", path, limit_s=wait_s + 30, admin=True)
        if status == 200:
            return
        if status != 400:
            raise self._refusal(path, status, body)
        load = await self.load()
        busy = f" ({load.running} running, {load.queued} queued)" if load is not None else ""
        raise ServerError(
            f"the server's cache could not be flushed within {wait_s:g} s{busy}",
            why=body[:_SHOWN_CHARACTERS].decode("utf-8", errors="replace").strip(),
            next="wait until nobody else uses the server, then run again",
        )

    # Work.

    async def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        rids: Sequence[str] | None = None,
        routed_dp_rank: int | None = None,
    ) -> list[Generated]:
        """One POST with all requests, exactly as sglang's kl_test_utils sends it, and their answers in order.

        Cancelled, it asks the server to abort these requests before it returns.
        """
        self.leave.check(Leave.COMPUTE, f"a request to {self.url}")
        body: dict[str, Any] = {
            "input_ids": [list(map(int, ids)) for ids in input_ids],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        }
        if return_logprob:
            body |= {
                "return_logprob": True,
                "return_text_in_logprobs": False,
                "logprob_start_len": logprob_start_len,
            }
        if routed_dp_rank is not None:
            body["routed_dp_rank"] = routed_dp_rank
        if rids is not None:
            body["rid"] = list(rids)
        entries = len(input_ids) * (max_new_tokens + 1)
        if return_logprob and logprob_start_len >= 0:
            entries += sum(map(len, input_ids))
        stream = AnswerStream(len(input_ids))

        def take(part: bytes) -> None:
            self.answer_bytes += len(part)
            stream.feed(part)

        try:
            status, answer = await self._call(
                "POST",
                "/generate",
                body,
                limit_s=None,
                largest_bytes=_SMALL_ANSWER_BYTES + entries * _ENTRY_BYTES,
                take=take,
            )
        except asyncio.CancelledError:
            if rids is not None:
                await self.abort(rids)
            raise
        if status != 200:
            raise self._refusal("/generate", status, answer)
        return stream.finish()

    async def generate_one_each(self, rids: Sequence[str]) -> None:
        """Generates one token under each id, from a prompt of one token."""
        await self.generate([[1]] * len(rids), max_new_tokens=1, rids=rids)

    async def dumper(self, method: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]] | None:
        """What each rank's dumper answers ("configure", "get_state"); None where the server has no route.

        The server's scheduler does nothing else until it has answered.
        """
        path = f"/dumper/{method}"
        status, answer = await self._call("POST", path, body or {}, admin=True)
        if status == 404:
            return None
        if status != 200:
            raise self._refusal(path, status, answer)
        try:
            ranks = json.loads(answer)
        except (ValueError, RecursionError):
            ranks = None
        if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
            raise ServerError(f"the server's answer to {path} does not hold one object for each rank")
        return ranks

    async def abort(self, rids: Sequence[str], *, limit_s: float = 10) -> None:
        """Asks the server to drop these requests; one that is gone or does not answer is no error."""

        async def drop(rid: str) -> None:
            with contextlib.suppress(ServerError):
                await self._call("POST", "/abort_request", {"rid": rid}, limit_s=limit_s, quiet=True)

        work = asyncio.gather(*(drop(rid) for rid in rids))
        # The caller is being cancelled: what has begun is finished first.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(work), limit_s)

    # Text.

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text, as the server's tokenizer encodes it."""
        body = {"prompt": list(texts), "add_special_tokens": add_special_tokens}
        largest = _SMALL_ANSWER_BYTES + 16 * sum(map(len, texts))
        answer = await self._object("POST", "/tokenize", body, largest_bytes=largest, limit_s=300)
        tokens = answer.get("tokens")
        if (
            not isinstance(tokens, list)
            or len(tokens) != len(texts)
            or not all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in tokens)
        ):
            raise ServerError("the server's answer to /tokenize does not hold one list of ids for each text")
        return tokens

    async def detokenize(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of ids, special tokens included. Untrusted text."""
        body = {"tokens": [list(map(int, ids)) for ids in tokens], "skip_special_tokens": False}
        largest = _SMALL_ANSWER_BYTES + 1024 * sum(map(len, tokens))
        answer = await self._object("POST", "/detokenize", body, largest_bytes=largest, limit_s=300)
        texts = answer.get("text")
        if not isinstance(texts, list) or len(texts) != len(tokens):
            raise ServerError("the server's answer to /detokenize does not hold one text for each list")
        return [str(text) for text in texts]
