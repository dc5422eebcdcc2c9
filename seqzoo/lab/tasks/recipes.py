"""What ``seqzoo compare --task NAME`` runs by default, where tasks share it: minutes on two cores."""

from seqzoo.lab.compare import Comparison
from seqzoo.lab.train import TrainConfig

SHORT = Comparison(  # up to 64 tokens
    dim=64, embedding_std=0.3, training=TrainConfig(steps=500, batch_size=32, lr=2e-3)
)
LONG = Comparison(  # about 1000
    dim=64, embedding_std=0.3, training=TrainConfig(steps=100, batch_size=4, lr=2e-3, evaluations=4)
)
# Wide embeddings let attention find the pairs in 500 steps, where 0.02 takes thousands. The other mixers take longer.
RECALL = Comparison(
    mixers=("attention", "hgrn2", "hgru"),
    dim=64,
    embedding_std=0.3,
    training=TrainConfig(steps=800, batch_size=32, lr=2e-3),
)
