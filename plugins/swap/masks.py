"""What attention masks hide, told apart into the future, pads, and what a mixer can't take into account."""

import torch
from torch import Tensor

HIDES = -1e4  # an additive mask hides from here down


def hidden_by(mask: Tensor, true_hides: bool) -> tuple[Tensor, Tensor]:
    """What a boolean or additive mask hides, True there, and whether it does nothing else, such as adding other numbers."""
    if not mask.is_floating_point():
        return mask.bool() == true_hides, torch.ones((), dtype=torch.bool, device=mask.device)
    hidden = mask <= HIDES
    return hidden, (hidden | (mask == 0)).all()


def hides_the_future(mask: Tensor, true_hides: bool, length: int) -> bool:
    """Whether a mask [..., T, T] hides the future, all of it and nothing else."""
    if mask.shape[-2:] != (length, length):
        return False
    hidden, alone = hidden_by(mask, true_hides)
    future = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return bool(alone & (hidden == future).all())


def tokens_of(
    mask: Tensor, x: Tensor, past: int, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Where x [B, T, D] has tokens, [B, T], by a mask of transformers, and whether it hides pads and the future alone.

    Nothing here waits for the device.

    Args:
        mask: [B, S], true at tokens, or [B or 1, 1, T, S], boolean (true: may look) or additive. S are the places that a
            cache has read, then those of x, then places not used yet; or fewer, where it leaves out the oldest.
        past: how many the cache has read.
        causal: whether the mask should hide the future.
        window: the old attention's; a mask may hide what is so many tokens away, or more.

    Returns:
        (tokens, alone), or None if the shape is not as above.
    """
    batch, length = x.shape[:2]
    if mask.shape[-1] < length:
        return None
    past = min(past, mask.shape[-1] - length)
    end = past + length
    if mask.dim() == 2:
        tokens = mask[:, past:end].bool().expand(batch, length)
        return tokens, torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != length:
        return None
    hidden, alone = hidden_by(mask, true_hides=False)
    alone = alone & hidden[..., end:].all()
    looks = ~hidden[:, 0, :, :end].expand(batch, length, end)
    tokens = looks[:, :, past:].diagonal(dim1=1, dim2=2)  # a token sees itself
    # places before x are tokens if any token of x sees them: what a cache has read is not known here
    known = torch.cat([(looks[:, :, :past] & tokens[:, :, None]).any(1), tokens], 1)
    apart = torch.arange(past, end, device=x.device)[:, None] - torch.arange(end, device=x.device)
    reach = (apart >= 0) | (not causal)
    near = reach if window is None else reach & (apart.abs() < window)
    fits = [((looks == (known[:, None] & span)) | ~tokens[:, :, None]).all() for span in (reach, near)]
    return tokens, alone & (fits[0] | fits[1])
