"""seqzoo's models in Lightning: a module, data whose batches depend on the step alone, states carried between batches.

module = SeqzooModule(mixer=["hgrn2", "attention"])
Trainer(max_steps=1000).fit(module, StepData(task, batch_size=8))
"""

from ..required import require

require("lightning", "2.5", below="3", extra="lightning")

from .carry import CarryState
from .data import StepData
from .module import SeqzooModule

__all__ = ["CarryState", "SeqzooModule", "StepData"]
