"""Two Lightning runs, one of which goes on from a checkpoint of the other; for test_lightning_plugin.py, under torchrun."""

import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
import lightning  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from seqzoo.lab.tasks import create_task  # noqa: E402
from seqzoo_plugins.lightning import CarryState, SeqzooModule, StepData  # noqa: E402


def train(text, folder, processes, dropout, resume=None):
    """Weights after six steps, and the validation metric."""
    torch.manual_seed(0)
    module = SeqzooModule(dim=16, depth=2, mixer=["hgru", "attention"], dropout=dropout).double()
    trainer = lightning.Trainer(
        max_steps=6, devices=processes, strategy="ddp" if processes > 1 else "auto", accelerator="cpu", logger=False,
        callbacks=[CarryState(), ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")],
        precision="64-true", num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = StepData(create_task("text", data=text, seq_len=16), batch_size=4, steps_per_epoch=6)
    torch.manual_seed(7 + trainer.global_rank)  # each draws its own dropout
    trainer.fit(module, data, ckpt_path=resume and str(resume))
    return dict(module.model.state_dict()), trainer.callback_metrics["valid_bits"]


def main(text, out):
    torch.set_num_threads(1)
    found = {"plain": train(text, Path(out) / "plain", 2, 0.0)}
    found["whole"] = train(text, Path(out) / "whole", 2, 0.2)
    found["resumed"] = train(text, Path(out) / "resumed", 2, 0.2, Path(out) / "whole" / "step=3.ckpt")
    if torch.distributed.get_rank() == 0:
        torch.save(found, f"{out}/found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
