"""Metrics that torchmetrics does not have. Importing this module imports torchmetrics (2 s)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy


class BitsPerByte(Metric):
    """Mean cross entropy of the next byte, in bits: log2 of the perplexity of a byte-level model.

    Sums log-softmax in float64, so that neither a very wrong prediction nor a long validation set loses digits
    (``torchmetrics.text.Perplexity`` takes the logarithm of a softmax, which is −inf once a probability underflows).
    Targets of −100 do not count.
    """

    full_state_update = False
    higher_is_better = False
    nats: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add logits [B, T, V] for targets [B, T]."""
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        self.nats += losses.double().sum()
        self.count += (targets != -100).sum()

    def compute(self) -> Tensor:
        """The mean over everything added so far, in bits."""
        return self.nats / self.count / math.log(2)


class TokenAccuracy(MulticlassAccuracy):
    """Share of the targets that the largest logit names. Targets of −100 do not count."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, average="micro", ignore_index=-100)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add logits [B, T, V] for targets [B, T]."""
        super().update(logits.flatten(0, 1), targets.flatten())
