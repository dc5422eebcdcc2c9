"""The lab: train mixers side by side on real text and see what each costs and reaches.

task = NextByte(load_text(None, seq_len=128), seq_len=128)
for result in compare_mixers(Comparison(mixers=("hgrn2", "attention")), task):
    print(result)
"""

from seqzoo.lab.compare import Comparison, Result, compare_mixers
from seqzoo.lab.data import NextByte, Text, load_text
from seqzoo.lab.errors import LabError
from seqzoo.lab.folder import ResultsFolder
from seqzoo.lab.measure import decode_speed, parameter_count
from seqzoo.lab.train import StepRecord, Task, TrainConfig, Trainer

__all__ = [
    "Comparison",
    "LabError",
    "NextByte",
    "Result",
    "ResultsFolder",
    "StepRecord",
    "Task",
    "Text",
    "TrainConfig",
    "Trainer",
    "compare_mixers",
    "decode_speed",
    "load_text",
    "parameter_count",
]
