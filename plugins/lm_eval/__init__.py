"""seqzoo's models in the Language Model Evaluation Harness.

lm_eval.simple_evaluate(model=SeqzooLM("runs/hgrn2"), tasks=[...])
"""

from ..required import require

require("lm-eval", "0.4.13", below="0.5", extra="lm-eval")

from .model import SeqzooLM

__all__ = ["SeqzooLM"]
