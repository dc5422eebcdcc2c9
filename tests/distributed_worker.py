"""Two processes that share a batch, run by test_distributed.py under torchrun; the first one writes what they computed."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqzoo

warnings.filterwarnings("ignore")


def build(mixer, **options):
    torch.manual_seed(0)
    return seqzoo.LanguageModel(64, 16, 2, mixer=mixer, **options).double()


def tokens():
    return torch.randint(64, (4, 20), generator=torch.Generator().manual_seed(1))


def loss_of(model, batch):
    logits, _ = model(batch[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def data_parallel(mixer):
    model = DistributedDataParallel(build(mixer))
    return model.module, model


def sharded(mixer, **options):
    model = build(mixer, **options)
    for block in model.backbone.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, model


def compiled(mixer):
    model, _ = sharded(mixer, activation_checkpointing=True)
    for block in model.backbone.blocks:
        block.compile(backend="aot_eager")
    return model, model


def checkpointed(mixer):
    return sharded(mixer, activation_checkpointing=True)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(way, mixer, steps=2):
    """Largest difference from one process in loss, gradients and weights after some steps."""
    alone = build(mixer)
    model, call = way(mixer)
    mine = tokens().chunk(dist.get_world_size())[dist.get_rank()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    worst = 0.0
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, loss = loss_of(alone, tokens()), loss_of(call, mine)
        expected.backward()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        pairs = [(mean / dist.get_world_size(), expected.detach())]
        named = dict(model.named_parameters())
        for name, p in alone.named_parameters():
            own = named[name]
            pairs.append(
                (
                    torch.zeros_like(p) if own.grad is None else whole(own.grad),
                    p.grad if p.grad is not None else torch.zeros_like(p),
                )
            )
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, *((got - want).abs().max().item() for got, want in pairs))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        again = build(mixer)
        again.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
        for got, want in zip(again.parameters(), alone.parameters(), strict=True):
            worst = max(worst, (got - want).abs().max().item())
    return worst


def main(out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for way in (data_parallel, sharded, checkpointed, compiled):
        for mixer in [*seqzoo.list_mixers(), ["hgrn2", "attention"]]:
            results[f"{way.__name__} {mixer}"] = difference(way, mixer)
            dist.barrier()
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
