"""One training loop a framework, each resuming by that framework's own means; plugin_battery.py runs and kills them.

A loop trains the same model on the same batches, generates in its own way, and leaves the loss, the text and the weights.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plugin_loops_distributed import fsdp2, torchrun, torchtitan
from plugin_run import BATCH, DEPTH, DIM, LR, NEW, PROMPT, Run, leave, optimizer, plain_loop, prompt
from torch import Tensor, nn
from torch.nn import functional as F

# ---- plain torch: a GPT with attention of its own, swapped


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.n_embd = n_embd
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Layer(nn.Module):
    """Named as seqzoo.model.Block, so that weights can be carried over."""

    def __init__(self) -> None:
        super().__init__()
        inner = -(-8 * DIM // 48) * 16
        self.mixer_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.mixer = CausalSelfAttention(DIM)
        self.ffn_in, self.ffn_out = nn.Linear(DIM, 2 * inner, bias=False), nn.Linear(inner, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        gate, value = self.ffn_in(self.ffn_norm(x)).chunk(2, -1)
        return x + self.ffn_out(F.silu(gate) * value)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.backbone = nn.ModuleDict({"blocks": nn.ModuleList(Layer() for _ in range(DEPTH))})
        self.backbone["norm"] = nn.RMSNorm(DIM, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.backbone["blocks"]:  # type: ignore[union-attr]
            x = block(x)
        return F.linear(self.backbone["norm"](x), self.embedding.weight)


def swap(run: Run) -> None:
    from seqzoo_plugins.swap import swap_mixers

    torch.manual_seed(0)
    model = GPT()
    for i in range(DEPTH):
        swap_mixers(model, f"backbone.blocks.{i}.mixer", to=run.mixers[i % len(run.mixers)])
    plain_loop(run, model, model)
    text = prompt()
    for _ in range(NEW):  # this loop has no state: each token takes a pass over all
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    weights = {name.replace("mixer.mixer.", "mixer."): value for name, value in model.state_dict().items()}
    leave(run, model, text[0, len(PROMPT) :], weights, run.model(lower_bound=None).config)


# ---- transformers


def transformers(run: Run) -> None:
    import transformers

    from seqzoo_plugins.transformers import SeqzooConfig, SeqzooForCausalLM

    class Death(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.done(state.global_step)

    torch.manual_seed(0)
    model = SeqzooForCausalLM(SeqzooConfig(vocab_size=256, dim=DIM, depth=DEPTH, mixer=list(run.mixers)))
    pieces = [run.task.train_batch(step, BATCH, 0)[0] for step in range(run.steps)]
    rows = [{"input_ids": row, "labels": row} for row in torch.cat(pieces)]
    arguments = transformers.TrainingArguments(
        output_dir=str(run.folder), max_steps=run.steps, per_device_train_batch_size=BATCH, learning_rate=LR,
        save_steps=run.every, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Death()])
    trainer.train(resume_from_checkpoint=bool(list(run.folder.glob("checkpoint-*"))) or None)
    model.eval()
    model.save_pretrained(run.folder / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "model")
    text = again.generate(prompt(), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    config = {**again.model.config, "activation_checkpointing": False}
    leave(run, lambda x: again(x).logits, text[0, len(PROMPT) :], again.model.state_dict(), config)


# ---- Lightning


def lightning(run: Run) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from seqzoo_plugins.lightning import SeqzooModule, StepData

    class Death(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            run.done(trainer.global_step)

    torch.manual_seed(0)
    module = SeqzooModule(dim=DIM, depth=DEPTH, mixer=list(run.mixers), lr=LR)
    keep = ModelCheckpoint(run.folder, every_n_train_steps=run.every, save_last=True)
    trainer = lightning.Trainer(
        max_steps=run.steps, callbacks=[keep, Death()], accelerator="cpu", logger=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=2,
    )  # fmt: skip
    last = run.folder / "last.ckpt"
    data = StepData(run.task, batch_size=BATCH, steps_per_epoch=60)
    trainer.fit(module, data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    text = module.model.eval().generate(prompt(), NEW, temperature=0).tokens[0]
    leave(run, lambda x: module(x)[0], text, module.model.state_dict(), module.model.config)


def fabric(run: Run) -> None:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = run.model()

    def write(tensors: Any, path: Path) -> None:
        fabric.save(path.with_suffix(".partial"), tensors)
        os.replace(path.with_suffix(".partial"), path)

    wrapped, made = fabric.setup(model, optimizer(model))
    plain_loop(
        run, model, lambda x: wrapped(x)[0], made=made, backward=fabric.backward,
        write=write,
    )  # fmt: skip
    text = model.eval().generate(prompt(), NEW, temperature=0).tokens[0]
    leave(run, lambda x: wrapped(x)[0], text, model.state_dict(), model.config)


LOOPS: dict[str, Callable[[Run], None]] = {
    loop.__name__: loop for loop in (swap, transformers, lightning, fabric, fsdp2, torchrun, torchtitan)
}
PROCESSES = {"fsdp2": 2, "torchtitan": 2}
