"""Tasks to compare mixers on: text, and tasks that are drawn from a seed. One family a file.

task = create_task("mqar", pairs=8, seq_len=128)
inputs, targets = task.train_batch(0, batch_size=4, seed=0)  # [4, 128]
"""

import importlib
import pkgutil

from seqzoo.lab.tasks.registry import TaskInfo, create_task, list_tasks, register_task, task_info
from seqzoo.lab.tasks.synthetic import Synthetic

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Synthetic", "TaskInfo", "create_task", "list_tasks", "register_task", "task_info"]
