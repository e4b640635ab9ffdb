"""One sglang server, launched by us or attached to: the engine's face to the session layer.

    server = await Server.start(Demo("dense"), LaunchOptions(), folder=folder, observe=observer)
    try:
        columns = await server.run_helper("match", prompts, max_new_tokens=128)
    finally:
        await server.stop()

A server that was started is ended by `stop`, by a failed or cancelled start, and by the end of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from klbench.core.columns import HelperColumns, HelperName
from klbench.engine.arms import ArmOptions, Rids, run_arms
from klbench.engine.attached import Agree, AttachedControl, find_control
from klbench.engine.client import Keys, ServerClient
from klbench.engine.facts import (
    ServerFacts,
    compare_with_asked,
    git_state,
    parse_arguments,
    read_facts,
    read_model_config,
)
from klbench.engine.generation_arm import GenerationArm, Keep
from klbench.engine.launching import (
    LaunchError,
    ServerObserver,
    Unobserved,
    next_step,
    on_a_free_port,
    wait_ready,
)
from klbench.engine.others import Others
from klbench.engine.path_map import SAME_PATHS, PathMap
from klbench.engine.phases import kv_cache_dtype
from klbench.engine.presence import Presence, wait_for_presences
from klbench.engine.process import Ended, ServerProcess
from klbench.engine.progress import ArmObserver, Look, from_load, from_log, shows_batches
from klbench.engine.target import Demo, Launch, LaunchOptions, Plan, plan_launch
from klbench.engine.versions import doubt_about
from klbench.errors import KlbenchError, UndecidedError

LAUNCH_TIMEOUT_S = 3600.0


class Server:
    """A server that is ready. Make it with `start` or `attach`."""

    def __init__(
        self,
        *,
        url: str,
        client: ServerClient,
        facts: ServerFacts,
        info: dict[str, Any],
        plan: Plan | None,
        process: ServerProcess | None,
        launch_s: float,
        ready_to_capture: bool,
        presences: Sequence[Presence] = (),
        notes: Sequence[str] = (),
        attached: AttachedControl | None = None,
        paths: PathMap = SAME_PATHS,
    ) -> None:
        self.url = url
        self.client = client
        self.facts = facts
        self.info = info
        self.plan = plan
        self.launch_s = launch_s
        self.ready_to_capture = ready_to_capture
        self.presences = tuple(presences)
        self.notes = tuple(notes)
        self.differs = compare_with_asked(plan.spec.arguments, info) if plan is not None else []
        self.foreign_requests = 0
        """The most requests of others that were seen beside the latest helper's: engine/others.py."""
        self.retracted_requests: set[int] = set()
        """The requests of the latest helper that the server retracted and computed again."""
        self._others = Others()
        self._shows_prefill = False
        self._process = process
        self._attached = attached
        self.paths = paths
        """Where the server and klbench see one folder under two paths."""

    # Making one.

    @classmethod
    async def start(
        cls,
        target: Demo | Launch,
        options: LaunchOptions | None = None,
        *,
        folder: Path,
        observe: ServerObserver | None = None,
        keys: Keys | None = None,
        launch_timeout_s: float = LAUNCH_TIMEOUT_S,
    ) -> Server:
        """Starts a server and returns it ready, with its plugin proved present in every rank.

        `folder` (made, mode 0700) gets the log and the control folder. Call it from the main thread. Raises
        LaunchError with the server's own error, DeadlineError after `launch_timeout_s`. A demo whose
        deterministic default turns the radix cache off is started again with triton.
        """
        options = options or LaunchOptions()
        observe = observe or Unobserved()
        port_is_ours = "--port" not in parse_arguments(options.arguments)

        async def started(options: LaunchOptions, notes: tuple[str, ...] = ()) -> Server:
            return await on_a_free_port(
                lambda: cls._start_once(target, options, folder, observe, keys, launch_timeout_s, notes),
                observe,
                ours=port_is_ours,
            )

        server = await started(options)
        users = server.plan.spec.arguments if server.plan is not None else ()
        if (
            isinstance(target, Demo)
            and options.deterministic
            and options.attention_backend is None
            and server.facts.radix_cache is False
            and "--attention-backend" not in users
            and "--disable-radix-cache" not in users
        ):
            default = server.facts.attention_backend
            note = (
                f"sglang's deterministic default on this GPU is {default}, which turns the radix cache off; "
                "started again with triton, which keeps it"
            )
            observe.warning(note, "without the radix cache two of the three helpers cannot run", "")
            await server.stop()
            server = await started(replace(options, attention_backend="triton"), (note,))
        return server

    @classmethod
    async def _start_once(
        cls,
        target: Demo | Launch,
        options: LaunchOptions,
        folder: Path,
        observe: ServerObserver,
        keys: Keys | None,
        launch_timeout_s: float,
        notes: tuple[str, ...],
    ) -> Server:
        place = _new_place(folder)
        plan = await plan_launch(target, options, log=place / "server.log", control_dir=place / "control")
        keys = replace(keys or Keys(), launched_with=plan.api_key, launched_with_admin=plan.admin_api_key)
        client = ServerClient(plan.url, keys=keys, on_call=observe.call, keep_body=observe.keep_body)
        observe.starting(plan.spec.as_line(), plan.spec.log, options.ready_to_capture, options.fault)
        process = ServerProcess.start(plan.spec)
        try:
            await wait_ready(process, client, observe, launch_timeout_s)
            launch_s = process.elapsed_s
            info, model = await client.server_info(), await client.model_info()
            facts = await _facts_of_ours(plan, process, info, model)
            presences = await wait_for_presences(
                plan.spec.control_dir, plan.spec.nonce, facts.model_processes
            )
            return cls(
                url=plan.url,
                client=client,
                facts=facts,
                info=info,
                plan=plan,
                process=process,
                launch_s=launch_s,
                ready_to_capture=options.ready_to_capture or facts.cuda_graphs is False,
                presences=presences,
                notes=(*plan.notes, *notes, *_doubts(facts)),
            )
        except BaseException:
            await asyncio.shield(process.stop())
            await client.close()
            raise

    @classmethod
    async def attach(
        cls,
        url: str,
        *,
        observe: ServerObserver | None = None,
        keys: Keys | None = None,
        attach_root: Path | None = None,
        agree: Agree | None = None,
        paths: PathMap = SAME_PATHS,
    ) -> Server:
        """A server that somebody else runs; nothing is changed on it. Raises ServerError if there is none.

        `attach_root` holds the control folders of servers that were started with our exports, as do the
        folders of `paths`; to tell which of them it is, it may be asked for one token, after `agree`.
        """
        observe = observe or Unobserved()
        client = ServerClient(url, keys=keys, on_call=observe.call, keep_body=observe.keep_body)
        try:
            info, model = await client.server_info(), await client.model_info()
            config = read_model_config(_model_path(info, model), paths)
            facts = read_facts(info, model, config=config)
            attached = None
            if attach_root is not None:
                ranks, ask = facts.model_processes, client.generate_one_each
                attached = await find_control(
                    attach_root, client.url, ranks, ask=ask, agree=agree, paths=paths
                )
        except BaseException:
            await client.close()
            raise
        return cls(
            url=client.url,
            client=client,
            facts=facts,
            info=info,
            plan=None,
            process=None,
            launch_s=0.0,
            ready_to_capture=attached is not None and facts.cuda_graphs is False,
            presences=attached.presences if attached is not None else (),
            notes=(
                *((attached.note,) if attached is not None and attached.note else ()),
                *_doubts(facts),
            ),
            attached=attached,
            paths=paths,
        )

    # What it is.

    @property
    def owned(self) -> bool:
        """Whether we started it."""
        return self._process is not None

    @property
    def log(self) -> Path | None:
        return self.plan.spec.log if self.plan is not None else None

    @property
    def control_dir(self) -> Path | None:
        """The private folder that our plugin reads and writes; None for a server without our plugin."""
        if self._attached is not None:
            return self._attached.control_dir
        return self.plan.spec.control_dir if self.plan is not None else None

    @property
    def nonce(self) -> str | None:
        if self._attached is not None:
            return self._attached.nonce
        return self.plan.spec.nonce if self.plan is not None else None

    @property
    def command(self) -> str | None:
        return self.plan.spec.as_line() if self.plan is not None else None

    @property
    def process(self) -> ServerProcess | None:
        return self._process

    def why_not(self, helper: HelperName) -> str | None:
        """Why the helper cannot run on this server, or None."""
        if helper != "match" and self.facts.radix_cache is False:
            return "the radix cache is off (disable_radix_cache): nothing can be restored from it"
        return None

    def check_comparable(self) -> None:
        """Raises UndecidedError where the server's settings make prefill and decode incomparable."""
        if self.facts.speculative is not None:
            raise UndecidedError(
                f"the server decodes speculatively ({self.facts.speculative})",
                why="its output logprobs come from verifying drafts, not from decode",
                next="start the server without speculative decoding",
            )
        if self.facts.disaggregation is not None:
            raise UndecidedError(
                f"the server is one half of a pair ({self.facts.disaggregation})",
                why="prefill and decode run on different servers, and a flush reaches only one",
                next="measure a server that does both",
            )
        harmless = ("temperature", "max_new_tokens", "ignore_eos", "n", "stream_interval")
        preferred = self.facts.preferred_sampling_params or {}
        spoiling = {name: value for name, value in preferred.items() if name not in harmless}
        if spoiling:
            raise UndecidedError(
                f"the server adds its own sampling parameters: {spoiling}",
                why="penalties and filters change the logprobs of generated tokens, not of scored ones",
                next="start the server without --preferred-sampling-params",
            )

    # Work.

    def arm_options(self, separator_ids: Sequence[int] | None = None, *, flush: bool = True) -> ArmOptions:
        """How arms run here: on one data-parallel rank, progress from the log or the load counters."""
        return ArmOptions(
            separator_ids=None if separator_ids is None else tuple(separator_ids),
            routed_dp_rank=0 if (self.facts.dp_size or 1) > 1 else None,
            vocab_size=self.facts.vocab_size,
            look=self._look,
            flush=flush,
            retracted=self.retracted_requests.add,
        )

    @property
    def _forwards(self) -> Path | None:
        """Our plugin's log of forwards, which its first rank writes."""
        return self.control_dir / "forwards-0.jsonl" if self.control_dir is not None else None

    def _look(self, requests: int) -> Look:
        if self.log is None:
            others = self._others
            return from_load(self.client, lambda load: others.hear(load, requests), forwards=self._forwards)
        self._shows_prefill = self._shows_prefill or shows_batches(self.log)
        interval = self.facts.decode_log_interval or 40
        return from_log(self.log, interval, forwards=self._forwards, shows_prefill=self._shows_prefill)

    async def run_helper(
        self,
        helper: HelperName,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        rids: Rids | None = None,
        observe: ArmObserver | None = None,
        separator_ids: Sequence[int] | None = None,
        earlier: GenerationArm | None = None,
        keep: Keep | None = None,
        flush: bool = True,
    ) -> HelperColumns:
        """Runs the helper's arms, without those that `earlier` has. An error of a server that died says how
        it died."""
        self.check_comparable()
        self._others, self.foreign_requests = Others(self._forwards, self.nonce, rids), 0
        self.retracted_requests.clear()
        weights = await self._weights()
        try:
            columns = await run_arms(
                self.client,
                helper,
                prompts,
                max_new_tokens=max_new_tokens,
                rids=rids,
                observe=observe,
                options=self.arm_options(separator_ids, flush=flush),
                earlier=earlier,
                keep=keep,
            )
        except KlbenchError:
            await self.raise_if_dead()
            raise
        self.foreign_requests = await self._others.most()
        if (now := await self._weights()) != weights:
            raise UndecidedError(
                "the model's weights were replaced while the arms ran",
                why=f"before: {weights}; after: {now}",
                next="keep weight updates away from the server while it is measured, and run again",
            )
        return columns

    async def _weights(self) -> str:
        """What the server says about which weights it holds."""
        model = await self.client.model_info()
        return ", ".join(f"{name} {model.get(name)}" for name in ("model_path", "weight_version"))

    async def raise_if_dead(self) -> None:
        """Raises LaunchError if our server has ended; a crash takes it some seconds after its last answer."""
        if self._process is None:
            return
        with contextlib.suppress(TimeoutError):
            if self._process.alive and await self.client.is_up():
                return
            ended = await asyncio.wait_for(self._process.wait_ended(), 15)
            raise LaunchError(
                "the server died",
                why=ended.why,
                next=next_step(
                    "\n".join((ended.why, *ended.last_lines)),
                    self._process.spec.log,
                    "what was measured so far is kept; start it again",
                ),
                ended=ended,
                log=self._process.spec.log,
            )

    async def wait_ended(self) -> Ended:
        """Waits until our server has ended, by whatever cause. Never returns for an attached server."""
        if self._process is None:
            await asyncio.Event().wait()
            raise AssertionError
        return await self._process.wait_ended()

    async def stop(self) -> Ended | None:
        """Ends a server of ours, closes the client. None for an attached server, which goes on."""
        await self.client.close()
        return await self._process.stop() if self._process is not None else None

    def kill_now(self) -> None:
        """Ends a server of ours at once, without an event loop."""
        if self._process is not None:
            self._process.kill_now()


def _new_place(folder: Path) -> Path:
    """A folder of its own for this start, with an empty control folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = 1
    while True:
        place = folder / f"server-{number}"
        try:
            place.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            continue
        (place / "control").mkdir(mode=0o700)
        return place


def _doubts(facts: ServerFacts) -> tuple[str, ...]:
    doubt = doubt_about(facts.sglang_version)
    return () if doubt is None else (doubt,)


def _model_path(info: dict[str, Any], model: dict[str, Any]) -> str | None:
    path = model.get("model_path") or info.get("model_path")
    return path if isinstance(path, str) else None


async def _facts_of_ours(
    plan: Plan, process: ServerProcess, info: dict[str, Any], model: dict[str, Any]
) -> ServerFacts:
    return read_facts(
        info,
        model,
        config=read_model_config(_model_path(info, model)),
        python=plan.python,
        git=await git_state(plan.python.sglang_path),
        gpus=plan.gpus,
        kv_dtype=kv_cache_dtype(process.log_tail()),
        environment=plan.spec.environment,
    )
