"""The head as operators: `lm_head`, `logits` and `logprob`, which are functions of the logits processor.

Rows are pruned before the head to those that need logits, and scoring works in chunks; both are mapped back
to the batch's rows. The row at position t carries the logprob of the token at t + 1: in a scoring arm the one
that the input has there, else the one that the sampler took. Whether a sampled token was used at all (the
sampler also runs after a chunk of a prompt) shows at the request's next forward: writing it is left to then.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .composition import Composition
from .recording import Recording, Selection
from .recording_writer import HeadCall

PROCESSOR = "LogitsProcessor"
_WRAPPED = ("_get_pruned_states", "_get_logits", "_compute_lm_head")
IN, OUT = 0, 1


class Head:
    """Puts itself around the functions of one logits processor; `recording()` is the forward's, or None.

    `operator` and `argument` number names; `trouble` takes an exception of ours.
    """

    def __init__(
        self,
        processor: Any,
        recording: Callable[[], Optional[Recording]],
        operator: Callable[[str], int],
        argument: Callable[[str], int],
        trouble: Callable[[BaseException], None],
    ) -> None:
        self._processor = processor
        self._recording = recording
        self._operator = operator
        self._argument = argument
        self._trouble = trouble
        self._rows: Optional[List[int]] = None
        self._input_rows: List[int] = []
        self._place = 0
        self._chunk: Optional[Tuple[int, Selection]] = None
        self._installed: Dict[str, Any] = {}

    @property
    def observes(self) -> bool:
        return len(self._installed) == len(_WRAPPED)

    def install(self) -> None:
        """Wraps what this version has of the functions, on the instance."""
        around = {
            "_get_pruned_states": self._pruned_states,
            "_get_logits": self._logits,
            "_compute_lm_head": self._lm_head,
        }
        for name in _WRAPPED:
            original = getattr(self._processor, name, None)
            if callable(original):
                self._installed[name] = self._wrapper(original, around[name])
                setattr(self._processor, name, self._installed[name])

    def remove(self) -> None:
        for name, wrapper in self._installed.items():
            if self._processor.__dict__.get(name) is wrapper:
                delattr(self._processor, name)
        self._installed = {}

    def _wrapper(self, original: Any, around: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            recording = self._recording()
            if recording is None:
                return original(*args, **kwargs)
            return around(recording, original, args, kwargs)

        return wrapper

    def _pruned_states(self, recording: Recording, original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            self._rows, self._input_rows, self._place = None, [], 0
            metadata = next(v for v in (*args, *kwargs.values()) if hasattr(v, "extend_return_logprob"))
            rows, input_rows = pruned_rows(recording.composition, recording.rows.total, metadata)
            if len(rows) == result[0].shape[0]:
                self._rows, self._input_rows = rows, input_rows
        except Exception as error:
            self._trouble(error)
        return result

    def _logits(self, recording: Recording, original: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        try:
            self._chunk = None
            if self._rows is not None:
                rows = self._rows[self._place : self._place + hidden.shape[0]]
                self._place += hidden.shape[0]
                group, selection = recording.group_of(rows)
                self._chunk = (group, selection) if selection.rows else None
        except Exception as error:
            self._trouble(error)
        result = original(*args, **kwargs)
        try:
            if self._chunk is not None:
                group, selection = self._chunk
                self._chunk = None
                if result.shape[0] == hidden.shape[0]:
                    recording.next_event()
                    logits = self._operator("logits")
                    recording.add_rows(logits, OUT, self._argument("0"), result, group, selection)
                    if is_scoring(recording.composition):
                        recording.next_event()
                        recording.repeat(self._operator("logprob"), IN, self._argument("logits"))
        except Exception as error:
            self._trouble(error)
        return result

    def _lm_head(self, recording: Recording, original: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        chunk = self._chunk
        number = self._operator("lm_head")
        try:
            # With data-parallel attention other ranks' rows come between: those are not ours to name.
            if chunk is not None and hidden.shape[0] == chunk[1].total:
                recording.next_event()
                recording.add_rows(number, IN, self._argument("hidden_states"), hidden, *chunk)
                nothing = torch.empty(0, dtype=torch.int64, device=recording.device)
                recording.extras.append((HeadCall(chunk[0], chunk[1].total), nothing))
        except Exception as error:
            self._trouble(error)
        result = original(*args, **kwargs)
        try:
            if chunk is not None and result.shape[0] == chunk[1].total:
                recording.next_event()
                recording.add_rows(number, OUT, self._argument("0"), result, *chunk)
                recording.next_event()
                recording.repeat(self._operator("logits"), IN, self._argument("0"))
        except Exception as error:
            self._trouble(error)
        return result

    def finished(self, recording: Recording, output: Any) -> None:
        """Notes the logprobs of the input's tokens, from the logits processor's output."""
        values = getattr(output, "input_token_logprobs", None)
        if not isinstance(values, torch.Tensor) or not is_scoring(recording.composition):
            return
        copied = getattr(output, "input_logprobs_copy_done", None)
        if copied is not None:
            copied.synchronize()
        rows = self._input_rows
        if len(rows) != values.shape[0]:
            return
        group, selection = recording.group_of(rows)
        if selection.rows:
            recording.next_event()
            on_device = values.to(recording.device)
            recording.add_rows(
                self._operator("logprob"), OUT, self._argument("0"), on_device, group, selection
            )


def is_scoring(composition: Composition) -> bool:
    """Whether the armed requests of a forward belong to a scoring arm; arms never share a forward."""
    return any(part.parsed is not None and part.parsed.arm == "scoring" for part in composition.armed)


def pruned_rows(composition: Composition, total: int, metadata: Any) -> Tuple[List[int], List[int]]:
    """The batch row of each row that reaches the head, and of each that scores a token of the input.

    The same rules as sglang's: all rows of a decode step; the last of each request in an extend; with input
    logprobs all from the request's start on, and the last one in any case.
    """
    mode = metadata.forward_mode
    if mode.is_decode_or_idle():
        return list(range(total)), []
    last = [part.row + part.rows - 1 for part in composition.parts]
    if not metadata.extend_return_logprob:
        return last, []
    rows: List[int] = []
    input_rows: List[int] = []
    first = 0
    lengths = zip(metadata.extend_seq_lens_cpu, metadata.extend_logprob_start_lens_cpu, strict=True)
    for length, start in lengths:
        rows += range(first + min(start, length - 1), first + length)
        input_rows += range(first + start, first + length)
        first += length
    return rows, input_rows


def sampled_rows(composition: Composition, samples: int) -> Optional[List[int]]:
    """The batch row behind each of the sampler's rows; None where they are not one a request."""
    if samples != len(composition.parts):
        return None
    return [part.row + part.rows - 1 for part in composition.parts]
