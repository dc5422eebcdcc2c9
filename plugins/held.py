"""What transformers asks of a cache that holds states, of a model or of a layer."""

from typing import Any

from torch import Tensor

from seqzoo import states


class HeldState:
    """Beams are picked and repeated in the state, and no token is taken back.

    state   None before the first token
    length  columns read, pads among them
    """

    state: Any
    length: int

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = states.select(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = states.repeat(self.state, repeats)

    def crop(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "a recurrent state can't forget its last tokens, so decoding methods that take tokens back can't be used"
        )
