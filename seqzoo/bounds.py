"""The hierarchical lower bound of HGRN: deeper layers may forget less."""

import torch
from torch import Tensor, nn

from .mixer import TokenMixer

FORMS = ("lm", "exclusive")


class LowerBounds(nn.Module):
    """Lower bounds of the forget gates of a stack, learnt together, owned by the stack.

    With P = softmax of Gamma [L, D] over the layers, in float32, layer k = 0 .. L - 1 gets

        form "lm":         gamma^k = P_1 + ... + P_k          (the authors' language models)
        form "exclusive":  gamma^k = P_0 + ... + P_{k-1}      (the paper, and the authors' long-range experiments)

    Both start at gamma^k = k / L, give layer 0 no bound, grow with k and stay below 1; they part once Gamma moves.

    Args:
        num_layers: L.
        dim: D, the width of the gates.
        form: "lm" or "exclusive".

    Raises:
        ValueError: an unknown form.

    Source: Qin et al. 2023, arXiv:2311.04823.
    """

    def __init__(self, num_layers: int, dim: int, form: str = "lm") -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"LowerBounds: expected form to be one of {', '.join(FORMS)}, got {form!r}.")
        self.form = form
        self.logits = nn.Parameter(torch.zeros(num_layers, dim))

    def forward(self) -> Tensor:
        """All bounds, [L, D]; hand row k to layer k as ``shared={"lower_bound": bounds[k]}``."""
        logits = self.logits if self.logits.dtype == torch.float64 else self.logits.float()
        share = logits.softmax(0)
        summed = share[1:].cumsum(0) if self.form == "lm" else share[:-1].cumsum(0)
        return torch.cat([torch.zeros_like(share[:1]), summed])


def takes_bound(mixer: TokenMixer) -> bool:
    """Whether a bound has a say in a mixer: it reads one, and its own option is not None, for none at all.

    A bound for a mixer that ignores it would be a parameter without a gradient.
    """
    return "lower_bound" in mixer.reads and mixer.config.get("lower_bound", 0.0) is not None
