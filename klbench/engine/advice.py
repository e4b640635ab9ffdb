"""What to do about an error of sglang's own: known errors, told by their words, and the next step for each.

    >>> advice("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.40 GiB")
    'lower --mem-fraction-static after --, take another GPU with CUDA_VISIBLE_DEVICES, ...'

The words are those of sglang 0.5.17 to 0.5.23 and of the libraries below it. An unknown error gets no advice
rather than a guess.
"""

from __future__ import annotations

import re

from klbench.engine import disorder

_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), step)
    for pattern, step in (
        (
            r"address already in use|port .{0,40}(is not available|already in use)",
            "leave --port out, klbench finds a free one; `ss -ltnp` shows who holds the port",
        ),
        (
            r"OutOfResources|out of resource: shared memory",
            "this GPU has too little shared memory for a Triton kernel of this sglang: take another GPU or "
            "another version of sglang; starting again will not help",
        ),
        (
            r"out of memory|OutOfMemory|not enough memory|Cannot allocate memory"
            r"|increase --mem-fraction-static|CUBLAS_STATUS_ALLOC_FAILED",
            "give the server less to hold or more to hold it in: --mem-fraction-static or --max-total-tokens "
            "after --, another GPU with CUDA_VISIBLE_DEVICES, or fewer --samples and --prompt-tokens",
        ),
        (
            r"deterministic.{0,200}backend|backend.{0,200}deterministic",
            "name a backend that deterministic mode takes, after --: --attention-backend triton, or fa3 on "
            "Hopper; the refused one may be the model's own default and not yours; --no-deterministic "
            "measures without the flag",
        ),
        (
            r"unrecognized arguments|: error: (argument|ambiguous option|the following arguments)",
            "correct the arguments after --; `python -m sglang.launch_server --help` lists what this version "
            "takes",
        ),
        (
            r"no kernel image|libcuda\.so|sgl_kernel|undefined symbol|CUDA driver version is insufficient",
            "the installed sglang, torch and driver do not fit together: `klbench doctor` shows the "
            "versions; name another Python with --server-python",
        ),
        (
            r"OfflineModeIsEnabled|LocalEntryNotFound|couldn't connect to .{0,40}huggingface"
            r"|Max retries exceeded|HTTPSConnectionPool|Cannot find .{0,80}in the cache"
            r"|outgoing traffic has been disabled",
            "the model is not on this machine and its hub cannot be reached: give a local folder to "
            "--launch, or fill the cache first",
        ),
        (
            r"RepositoryNotFound|is not a local folder and is not a valid model identifier|401 Client Error",
            "check the model's name; for a private model log in on its hub first",
        ),
        (
            r"trust_remote_code",
            "the model brings its own code: if you trust it, add --trust-remote-code after --",
        ),
        (
            r"(can.?t|cannot|could not|unable to) load (the )?tokenizer"
            r"|tokenizer.{0,80}(not found|no such file)|Couldn't instantiate the backend tokenizer",
            "the model's folder has no usable tokenizer: add --tokenizer-path DIR or --skip-tokenizer-init "
            "after -- (then give prompts as input_ids)",
        ),
        (
            r"(no file named|cannot find any model weights|no safetensors|model\.safetensors).{0,80}",
            "the model's folder has no weights that sglang can read: check that its download is complete",
        ),
        (
            r"model architectures? .{0,200}not supported|unsupported architecture"
            r"|does not recognize this architecture",
            "this sglang does not know the model's architecture: take a newer one with --server-python",
        ),
        (
            r"No module named",
            "the server's Python lacks a package: install it there, or name another Python with "
            "--server-python",
        ),
        (
            r"invalid device ordinal|CUDA_VISIBLE_DEVICES|no CUDA(-capable)? (GPUs|device)",
            "the server asks for a GPU that it does not see: check CUDA_VISIBLE_DEVICES and --tp-size",
        ),
        (
            r"No space left on device",
            "free space on the disk or in /dev/shm that the log names; `df -h` shows which is full",
        ),
        (
            disorder.PATTERN,
            "sglang's own check found its cache in disorder, a lead to a wrong restore (condition 2): "
            "keep the log and the prompts",
        ),
        (
            r"watchdog timeout",
            "a forward took longer than sglang allows: add --watchdog-timeout SECONDS after --; fewer and "
            "shorter prompts make shorter forwards",
        ),
    )
)


def advice(error: str) -> str | None:
    """The next step for an error whose words are known, None for any other. `error` is untrusted text."""
    return next((step for pattern, step in _KNOWN if pattern.search(error)), None)
