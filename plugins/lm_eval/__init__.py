"""seqzoo's models in the Language Model Evaluation Harness.

lm_eval.simple_evaluate(model=SeqzooLM("runs/hgrn2"), tasks=[...])
"""

try:
    import lm_eval  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError('seqzoo_plugins.lm_eval needs lm-eval: pip install "seqzoo[lm-eval]"') from error

from .model import SeqzooLM

__all__ = ["SeqzooLM"]
