"""Loops of several processes: FSDP2, torchtitan, and seqzoo train under torchrun."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from plugin_run import BATCH, DEPTH, DIM, LENGTH, LR, NEW, Run, leave, loss_of, optimizer, prompt

# ---- torch's own engine: FSDP2 in two processes, a sharded checkpoint that one process reads


def fsdp2(run: Run) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    store = run.folder / f"store-{run.kill_at}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=run.rank, world_size=run.processes)
    model = run.model()
    for block in model.backbone.blocks:
        fully_shard(block)
    fully_shard(model)
    opt, path, step = optimizer(model), run.folder / "sharded", 0

    def checkpoint() -> dict[str, Any]:
        weights, moments = get_state_dict(model, opt)
        return {"model": weights, "optimizer": moments, "step": step}

    kept = max(path.glob("*"), key=lambda p: int(p.name), default=None) if path.exists() else None
    if kept is not None:
        state = checkpoint()
        dcp.load(state, checkpoint_id=str(kept))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
    while step < run.steps:
        inputs, targets = (t.chunk(run.processes)[run.rank] for t in run.batch(step))
        opt.zero_grad()
        loss_of(model(inputs)[0], targets).backward()
        opt.step()
        step += 1
        if step % run.every == 0 or step == run.steps:
            partial = run.folder / "partial"
            dcp.save(checkpoint(), checkpoint_id=str(partial))
            if run.rank == 0:
                path.mkdir(exist_ok=True)
                partial.rename(path / str(step))
            dist.barrier()
        run.done(step)
    dist.destroy_process_group()
    if run.rank:
        return
    alone = run.model()
    state = {"model": alone.state_dict()}
    dcp.load(state, checkpoint_id=str(path / str(run.steps)), no_dist=True)
    alone.load_state_dict(state["model"])
    text = alone.eval().generate(prompt(), NEW, temperature=0).tokens[0]
    leave(run, lambda x: alone(x)[0], text, alone.state_dict(), alone.config)


# ---- torchtitan, which is shown a CPU as if it were an accelerator


def torchtitan(run: Run) -> None:
    import pretend_accelerator  # noqa: F401

    os.environ.update(
        RANK=str(run.rank), LOCAL_RANK=str(run.rank), WORLD_SIZE=str(run.processes), MASTER_ADDR="localhost",
        MASTER_PORT=str(20_000 + os.getppid() % 20_000),
    )  # fmt: skip
    from torchtitan.trainer import Trainer

    from seqzoo_plugins.torchtitan import load_model
    from seqzoo_plugins.torchtitan.config_registry import configuration

    config = configuration(list(run.mixers), dim=DIM, depth=DEPTH, lr=LR)
    config.dataloader.dataset_path, config.dump_folder, config.debug.seed = run.text, str(run.folder), 0
    config.training.steps, config.training.seq_len = run.steps, LENGTH
    config.training.local_batch_size = BATCH // run.processes
    config.training.mixed_precision_param = "float32"
    config.lr_scheduler.warmup_steps, config.checkpoint.interval, config.metrics.log_freq = 15, run.every, 50
    step = Trainer.train_step

    def mortal(self: Any, data: Any) -> None:
        run.done(self.step - 1)  # the step before, whose checkpoint is written by now
        step(self, data)

    Trainer.train_step = mortal  # type: ignore[method-assign]
    trainer = config.build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    if run.rank:
        return
    model = load_model(run.folder / "checkpoint" / f"step-{run.steps}", config.model_spec.model)  # type: ignore[union-attr, arg-type]
    text = model.generate(prompt(), NEW, temperature=0).tokens[0]
    leave(run, lambda x: model(x)[0], text, model.state_dict(), model.config)


# ---- torchrun -m seqzoo train


def torchrun(run: Run) -> None:
    """Two processes under torchrun, in a session of their own, all killed at once."""
    import subprocess

    from seqzoo.lab.checkpoint import load_model

    size = f"--dim {DIM} --depth {DEPTH} --seq-len {LENGTH} --batch-size {BATCH} --lr {LR} --evaluations 1"
    saving = f"--steps {run.steps} --checkpoint-every {run.every} --device cpu --resume"
    command = [
        sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2 -m seqzoo train".split(),
        ",".join(run.mixers), *size.split(), *saving.split(), "--data", run.text, "--out", str(run.folder / "run"),
    ]  # fmt: skip
    with (run.folder / "torchrun.log").open("ab") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        metrics = run.folder / "run" / "metrics.jsonl"
        while child.poll() is None:
            if run.kill_at and metrics.exists() and metrics.read_bytes().count(b"\n") >= run.kill_at:
                workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
                for process in (child.pid, *map(int, workers)):
                    os.kill(process, signal.SIGKILL)
                child.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.005)
    if child.returncode:
        raise SystemExit((run.folder / "torchrun.log").read_text()[-4000:])
    model = load_model(run.folder / "run")
    text = model.generate(prompt(), NEW, temperature=0).tokens[0]
    leave(run, lambda x: model(x)[0], text, model.state_dict(), model.config)
