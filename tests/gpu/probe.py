"""The state probe on a server that replays CUDA graphs: which layer and row the K/V tells of first.

    $ python -m tests.gpu.probe /models/dense --json probe.json --flags --attention-backend triton
    match diverged, 2032 of 2048 differ; graphs True
    state_write | ... model.layers.1.self_attn.attn at row 300

Exit code 0 where something was found and looking changed no logprob.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from klbench.core.kl import helper_result
from klbench.engine.capture_control import RequestIds
from klbench.engine.captured_work import Work, first_divergent_offset
from klbench.engine.prompts import load_prompts
from klbench.engine.server import Server
from klbench.engine.state_probing import GRAPHS, probe_state
from klbench.engine.target import Launch, LaunchOptions
from klbench.session.locating import server_side


async def probe(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures match with graphs on and looks at the state of its first divergent request."""
    options = LaunchOptions(arguments=tuple(arguments.flags), server_python=arguments.server_python)
    server = await Server.start(Launch(str(arguments.model)), options, folder=folder / "server")
    try:
        assert server.nonce is not None
        ids = RequestIds(server.nonce)
        side = server_side(server, ids)
        found = await load_prompts(server, samples=arguments.samples, prompt_tokens=300)
        prompts = found.as_lists()
        rids = ids.next_pass()
        number = ids.latest_pass
        columns = await server.run_helper("match", prompts, max_new_tokens=64, rids=rids)
        result = helper_result(columns)
        print(
            f"match {result['status']}, {result['divergent_tokens']} of {result['tokens']} differ; "
            f"graphs {server.facts.cuda_graphs}",
            flush=True,
        )
        request = next(
            index for index in range(columns.requests) if first_divergent_offset(columns, index) is not None
        )
        work = Work("match", prompts, request, columns, 64, (number,))
        outcome = await probe_state(side, work, because=GRAPHS, trace_dir=folder / "traces")
        return {
            "server": server.facts.as_dict(),
            "graphs": server.facts.cuda_graphs,
            "first_row": int(columns.prompt_len[request])
            + (first_divergent_offset(columns, request) or 0)
            - 1,
            **outcome.body(),
        }
    finally:
        await server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the state probe on a server with CUDA graphs.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--server-python", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="sglang's own; must come last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="klbench-gpu-") as name:
        document = asyncio.run(probe(arguments, Path(name)))
    document["capture"].pop("trace_dir", None)
    for finding in document["findings"]:
        print(f"{' | '.join(finding['kinds'])} {finding['module']} at row {finding['positions']['first']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, default=str, indent=1))
    return 0 if document["findings"] and not document["capture"]["changed_logprobs"] else 1


if __name__ == "__main__":
    sys.exit(main())
