"""seqzoo's models in Lightning: learning, going on to the same bits, states between batches, Fabric."""

import warnings

import pytest
import torch

import seqzoo
from seqzoo.lab.tasks import create_task

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    import torchmetrics
    from lightning.pytorch.callbacks import ModelCheckpoint

    from seqzoo_plugins.lightning import CarryState, SeqzooModule, StepData

SMALL = {"dim": 16, "depth": 1}
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, on workers, loggers and the future


@pytest.fixture
def task(text):
    return create_task("text", data=text, seq_len=16)


def trainer(tmp_path, steps, every=0, carry=False):
    callbacks = [CarryState()] * carry
    if every:
        callbacks.append(
            ModelCheckpoint(tmp_path, every_n_train_steps=every, save_top_k=-1, filename="{step}")
        )
    return lightning.Trainer(max_steps=steps, callbacks=callbacks, enable_checkpointing=bool(every), **QUIET)


@pytest.mark.parametrize("mixer", [*seqzoo.list_mixers(), ["hgrn2", "attention"]], ids=str)
def test_it_learns(mixer, task, tmp_path):
    torch.manual_seed(0)
    module, run = SeqzooModule(mixer=mixer, lr=0.01, **SMALL), trainer(tmp_path, 80)
    run.fit(module, StepData(task, steps_per_epoch=40))
    assert run.callback_metrics["valid_bits"] < task.text.unigram_entropy
    assert module.hparams["mixer"] == mixer


@pytest.mark.parametrize("stop", [5, 10, 13])
def test_it_goes_on_to_the_same_bits(stop, task, tmp_path):
    def run(name, ckpt_path=None):
        torch.manual_seed(0)
        module = SeqzooModule(mixer=["lru", "attention"], dim=16, depth=2, dropout=0.2)
        trainer(tmp_path / name, 20, every=stop).fit(
            module, StepData(task, steps_per_epoch=10), ckpt_path=ckpt_path
        )
        return module.state_dict()

    whole = run("one")
    resumed = run("two", str(tmp_path / "one" / f"step={stop}.ckpt"))
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


class Columns(torch.utils.data.Dataset):
    """A text of 4 rows cut into pieces of 8 tokens, each row going on from piece to piece."""

    tokens = torch.randint(256, (4, 49), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.tokens[:, 8 * i : 8 * i + 9]


def columns():
    return torch.utils.data.DataLoader(Columns(), batch_size=None)


@pytest.mark.parametrize("mixer", ["hgru", "attention", ["hgrn2", "attention"]], ids=str)
def test_states_go_on_from_batch_to_batch(mixer, tmp_path):
    torch.manual_seed(0)
    module, losses = SeqzooModule(mixer=mixer, lr=0.0, weight_decay=0.0, **SMALL).double(), []

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *_):
            losses.append(outputs["loss"].detach())

    run = lightning.Trainer(
        max_steps=6,
        callbacks=[CarryState(), Losses()],
        enable_checkpointing=False,
        precision="64-true",
        **QUIET,
    )
    run.fit(module, columns())
    whole = module.model.loss(Columns.tokens)
    torch.testing.assert_close(
        torch.stack(losses).mean().double(), whole.detach().double(), rtol=1e-6, atol=1e-6
    )


class ColumnTask:
    """The same as a task: epochs of six pieces."""

    def train_batch(self, step, batch_size, seed):
        piece = Columns()[step % 6]
        return piece[:, :-1], piece[:, 1:]

    def valid_batches(self, batch_size):
        return [self.train_batch(0, batch_size, 0)]


@pytest.mark.parametrize("stop", [3, 6, 8])
def test_carried_states_are_in_the_checkpoint(stop, tmp_path):
    def run(name, ckpt_path=None):
        torch.manual_seed(0)
        module = SeqzooModule(mixer=["hgru", "attention"], dim=16, depth=2)
        trainer(tmp_path / name, 12, every=stop, carry=True).fit(
            module, StepData(ColumnTask(), steps_per_epoch=6), ckpt_path=ckpt_path
        )
        return module.state_dict()

    whole = run("one")
    resumed = run("two", str(tmp_path / "one" / f"step={stop}.ckpt"))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_other_rows_cannot_go_on():
    class Shrinking(Columns):
        def __getitem__(self, i):
            return super().__getitem__(i)[: 4 - i]

    data = torch.utils.data.DataLoader(Shrinking(), batch_size=None)
    with pytest.raises(ValueError, match="expected a batch of 4 rows"):
        trainer(None, 3, carry=True).fit(SeqzooModule(**SMALL), data)


RUN = """
seed_everything: 0
model:
  dim: 16
  depth: 2
  mixer: [hgru, {{name: attention, num_heads: 2}}]
  betas: [0.9, 0.99]
data:
  task: text
  batch_size: 4
  steps_per_epoch: 5
  options: {{data: {text}, seq_len: 16}}
trainer:
  max_steps: 5
  accelerator: cpu
  logger: false
  num_sanity_val_steps: 0
  default_root_dir: {folder}
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}, filename: end}}
"""


def test_a_configuration_file_is_a_run(text, tmp_path):
    from lightning.pytorch.cli import LightningCLI

    def fit(name, *more):
        path, folder = tmp_path / f"{name}.yaml", tmp_path / name
        path.write_text(RUN.format(text=text, folder=folder))
        return LightningCLI(SeqzooModule, StepData, args=["fit", "--config", str(path), *more])

    cli = fit("one", "--model.lr", "0.002")
    assert [m["name"] for m in cli.model.model.config["mixer"]] == ["hgru", "attention"]
    assert (cli.model.hparams["lr"], cli.datamodule.batch_size, cli.trainer.global_step) == (0.002, 4, 5)
    assert isinstance(cli.model.bits, torchmetrics.Metric)
    torch.manual_seed(0)  # the same without a file
    task = create_task("text", data=text, seq_len=16)
    mixer = ["hgru", {"name": "attention", "num_heads": 2}]
    module = SeqzooModule(dim=16, depth=2, mixer=mixer, betas=(0.9, 0.99), lr=0.002)
    trainer(tmp_path, 5).fit(module, StepData(task, 4, 5))
    for name, value in cli.model.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    again = SeqzooModule.load_from_checkpoint(tmp_path / "one" / "end.ckpt")
    assert torch.equal(again.model.embedding.weight, cli.model.model.embedding.weight)


def test_options_belong_to_a_task_by_name(task):
    with pytest.raises(TypeError, match="options are those of a task given by name"):
        StepData(task, options={"seq_len": 3})
    with pytest.raises(ValueError, match="seq_len"):
        StepData("text", options={"seq_length": 3})


def test_loads_from_a_checkpoint_alone(task, tmp_path):
    torch.manual_seed(0)
    module = SeqzooModule(mixer="gla", **SMALL)
    trainer(tmp_path, 2, every=2).fit(module, StepData(task))
    again = SeqzooModule.load_from_checkpoint(tmp_path / "step=2.ckpt")
    x = torch.arange(9)[None]
    assert torch.equal(again(x)[0], module(x)[0])


def test_fabric_gives_what_a_plain_loop_gives(task):
    def train(setup, backward):
        torch.manual_seed(0)
        model = seqzoo.LanguageModel(256, 16, 1, mixer="hgru")
        model, optimizer = setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(5):
            inputs, targets = task.train_batch(step, 4, 0)
            loss = torch.nn.functional.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        return loss.item()

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    assert train(fabric.setup, fabric.backward) == train(lambda *pair: pair, torch.Tensor.backward)
