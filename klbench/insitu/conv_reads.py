"""The state of a short convolution as its rows read it: as rows of its input, like K/V rows with a window.

A row reads the `behind` inputs before it: those that its slot held before the call, or those that the call
was given. What a call leaves behind is its newest inputs, as they are in the slot after it. So for the
positions from the first that any row reaches to the last of the request, in one list:

    [what the slot held] [what was given] [the newest `behind` of it, as the slot holds them now]
"""

from typing import Any, Tuple

import torch

from .conv_operator import ShortConvolution
from .recording import Recording, to_device


class ConvolutionRead:
    """One call of a convolution in an armed forward: made before it, asked after it.

    `pool` is the request pool with the recurrent slots, `rows` [batch rows, channels] what the call is given.
    """

    def __init__(
        self, recording: Recording, batch: Any, pool: Any, module: ShortConvolution, rows: torch.Tensor
    ) -> None:
        self._parts = [part for _, part in recording.rows.parts]
        slots = pool.get_mamba_indices(batch.req_pool_indices)
        slots = getattr(pool, "translate_mamba_indices", lambda found: found)(slots).to(torch.int64)
        self._slots = slots.index_select(0, recording.requests)
        self._state = pool.mamba2_layer_cache(module.layer_idx).conv[0]
        self._behind = module.behind
        # Kernels may put their result where their input was.
        self._given = recording.selected(rows).clone()
        self._before = self._held()

    def _held(self) -> torch.Tensor:
        """The requests' newest inputs as their slots hold them, oldest first: [n, behind, channels]."""
        held = self._state.index_select(0, self._slots)[..., -self._behind :]
        return held.transpose(1, 2).to(self._given.dtype).contiguous()

    def result(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """(Pool slots int64 [n], rows [n, channels]) of all positions, request after request."""
        after, behind = self._held(), self._behind
        pieces, lengths = [], []
        start = 0
        for place, part in enumerate(self._parts):
            earlier = min(part.first_position, behind)
            newest = min(part.rows, behind)
            pieces += [
                self._before[place, behind - earlier :],
                self._given[start : start + part.rows - newest],
                after[place, behind - newest :],
            ]
            lengths.append(earlier + part.rows)
            start += part.rows
        (counts,) = to_device([torch.tensor(lengths, dtype=torch.int64)], self._slots.device)
        # Told the sum, the device need not be asked for it.
        slots = torch.repeat_interleave(self._slots, counts, output_size=sum(lengths))
        return slots, torch.cat(pieces)
