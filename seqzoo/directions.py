"""Causal mixers for data that is there as a whole: sequences read both ways, images read four ways."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from .errors import closest
from .mixer import Shared, TokenMixer


class Bidirectional(nn.Module):
    """A sequence read from both ends, so that each position sees all of it: the sum of the two readings.

        y = mixer(x) + flip(backward(flip(x)))

    It is called as a mixer is, but for what only makes sense in one direction: it has no state and no `step`. In a `Block` it
    takes a mixer's place. Costs, and weights if there are two mixers, are twice those of one. HGRN's own form adds the two
    scans up before their common norm and gate; this one adds up two whole mixers.

    Args:
        mixer: any mixer, of width D.
        backward: the mixer that reads backwards; by default `mixer` itself, its weights shared.

    Raises:
        TypeError: it is not a TokenMixer. ValueError: the widths differ.

    Source: bidirectional recurrence, Schuster and Paliwal 1997, doi:10.1109/78.650093.
    """

    def __init__(self, mixer: TokenMixer, backward: TokenMixer | None = None) -> None:
        super().__init__()
        _check_mixers("Bidirectional", [mixer, *([] if backward is None else [backward])])
        self.dim = mixer.dim
        self.mixer = mixer
        # None where the weights are shared: a module under two names would be saved twice
        self.own_backward = backward

    @property
    def backward_mixer(self) -> TokenMixer:
        return self.mixer if self.own_backward is None else self.own_backward

    def forward(
        self,
        x: Tensor,
        state: None = None,
        *,
        mode: str = "auto",
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        shared: Shared | None = None,
        **misspelt: NoReturn,
    ) -> tuple[Tensor, None]:
        """y [B, T, D] of x [B, T, D], and None in the place of a state; arguments as `TokenMixer.forward`.

        Raises:
            ValueError: there is a state. Others as `TokenMixer.forward`.
        """
        for key in misspelt:
            known = ("mode", "mask", "cu_seqlens", "max_seqlen", "shared")
            raise TypeError(f"Bidirectional: unexpected keyword argument {key!r}{closest(key, known)}")
        if state is not None:
            raise ValueError(
                "Bidirectional: it sees the whole sequence at once, so it can't go on from a state."
            )
        call = {"mode": mode, "max_seqlen": max_seqlen}
        ahead, _ = self.mixer(x, mask=mask, cu_seqlens=cu_seqlens, shared=shared, **call)
        order = _backwards(x, cu_seqlens)
        turned = None if cu_seqlens is None else cu_seqlens[-1] - cu_seqlens.flip(0)
        reads = self.backward_mixer.reads
        if shared is not None:
            shared = {
                name: value[:, order] if reads.get(name) == "token" else value
                for name, value in shared.items()
            }
        back, _ = self.backward_mixer(
            x[:, order],
            mask=None if mask is None else mask[:, order],
            cu_seqlens=turned,
            shared=shared,
            **call,
        )
        return ahead + back[:, order], None


class Scan2d(nn.Module):
    """An image read along its rows and its columns, each both ways, so that each place sees all of it.

        y = sum over four directions of unfold(mixer_d(fold_d(x)))

    fold_d lays the places out row after row, column after column, or one of these from the end.

    Args:
        mixers: one mixer of width D, its weights shared by all directions, or four: along the rows, along the columns, and
            each of these from the end.

    Raises:
        TypeError: one is not a TokenMixer. ValueError: there are neither one nor four of them, or their widths differ.

    Source: the cross-scan of Liu et al. 2024, arXiv:2401.10166.
    """

    def __init__(self, mixers: TokenMixer | Sequence[TokenMixer]) -> None:
        super().__init__()
        given = [mixers] if isinstance(mixers, TokenMixer) else list(mixers)
        if len(given) not in (1, 4):
            raise ValueError(f"Scan2d: expected one mixer or four, got {len(given)}.")
        _check_mixers("Scan2d", given)
        self.dim = given[0].dim
        self.mixers = nn.ModuleList(given)

    def forward(self, x: Tensor, *, mode: str = "auto", mask: Tensor | None = None) -> Tensor:
        """y [B, H, W, D] of x [B, H, W, D].

        Args:
            x: images, [B, H, W, D].
            mode: as for a mixer.
            mask: [B, H, W] bool, True where there is something; y is 0 elsewhere, and what stands there changes nothing.

        Raises:
            ValueError: a shape is not as above. Others as `TokenMixer.forward`.
        """
        if x.dim() != 4:
            raise ValueError(f"Scan2d: expected x of shape (B, H, W, D), got {tuple(x.shape)}.")
        if mask is not None and mask.shape != x.shape[:3]:
            raise ValueError(
                f"Scan2d: expected mask of shape (B, H, W) = {tuple(x.shape[:3])}, got {tuple(mask.shape)}."
            )
        total = torch.zeros_like(x)
        for direction in range(4):
            mixer = self.mixers[direction % len(self.mixers)]
            columns, back = direction % 2 == 1, direction >= 2
            image = x.transpose(1, 2) if columns else x
            here = mask if mask is None or not columns else mask.transpose(1, 2)
            line = image.flatten(1, 2)
            places = None if here is None else here.flatten(1, 2)
            if back:
                line, places = line.flip(1), None if places is None else places.flip(1)
            y, _ = mixer(line, mode=mode, mask=places)
            y = (y.flip(1) if back else y).unflatten(1, image.shape[1:3])
            total = total + (y.transpose(1, 2) if columns else y)
        return total


def _backwards(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The order of tokens that turns a row round, its own inverse; what stands behind a pack stays there."""
    place = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return place.flip(0)
    end = cu_seqlens[-1]
    return torch.where(place < end, end - 1 - place, place)


def _check_mixers(name: str, mixers: Sequence[TokenMixer]) -> None:
    for mixer in mixers:
        if not isinstance(mixer, TokenMixer):
            raise TypeError(f"{name}: expected a TokenMixer, got {type(mixer).__name__}.")
    widths = sorted({mixer.dim for mixer in mixers})
    if len(widths) > 1:
        raise ValueError(f"{name}: expected mixers of one width, got {widths}.")
