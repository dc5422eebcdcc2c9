"""seqzoo's models in torchtitan, which trains them on GPUs.

torchrun --nproc-per-node 8 -m seqzoo_plugins.torchtitan --config hgrn2+attention
"""

from ..required import require
from .released import lend_names

require("torchtitan", "0.3", below="0.4", extra="torchtitan")
lend_names()
try:
    import torchtitan.trainer  # noqa: F401
except ImportError as error:
    import torch

    raise ImportError(
        f"seqzoo_plugins.torchtitan: torchtitan 0.3 does not run with torch {torch.__version__}, or lacks something: {error}"
    ) from error

from .data import ByteLoader, ByteTokenizer
from .model import SeqzooModel, load_model
from .parallelize import parallelize

__all__ = ["ByteLoader", "ByteTokenizer", "SeqzooModel", "load_model", "parallelize"]
