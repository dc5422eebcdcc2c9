"""Whole layers on a GPU beside those of flash-linear-attention (fla): training, and a step of decoding, eager and as a graph.

    python scripts/gpu_layers.py [--only ours,fla,compiled] [--seconds 150] [--json FILE]

Each of our layers is first judged, in its dtype, against its float64 copy. fla's have other weights and are not judged. `ours`
and `fla` are eager; `compiled`, only where it is asked for, is `torch.compile` of ours, judged too. Beside a layer stand its
projections alone, which no kernel of ours can make cheaper, and for decoding a copy of as many bytes as its weights have.

A part that takes longer than `--part` seconds is given up, as is what has not begun after `--seconds`, and its row says so: a
cold compilation of another library takes minutes. The JSON is written after each part.
"""

import argparse
import copy
import functools
import importlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import seqzoo
from seqzoo_kernels import precision, use_backend
from seqzoo_kernels.bench import output, timing

# ours, and the layer of fla that computes the same
PEERS: dict[str, str | None] = {
    "hgru_real": "HGRNAttention",
    "hgru": None,  # the complex one, which has nearly twice the weights
    "hgrn2": "HGRN2Attention",
    "gla": "GatedLinearAttention",
    "lru": None,
}
SIZE = (
    8,
    2048,
    2048,
)  # B, T, D, at which there is something to reach on an H200: milliseconds, and microseconds a step
TRAINING = {"hgru_real": {"forward": 0.85, "forward and backward": 2.6}}
DECODING = {"step, us": 120.0, "step in a graph, us": 25.0}
STEPS = 300
JUDGED = 256  # tokens


class OutOfTime(BaseException):
    """No Exception: what is timed may catch all of those."""


def limited(function: Callable[..., dict[str, Any]], seconds: float, *given: Any) -> dict[str, Any]:
    """What the function returns, or why there is nothing."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(
        signal.ITIMER_REAL, seconds, 1.0
    )  # again and again: what is raised in a destructor is lost
    try:
        return function(*given)
    except OutOfTime:
        return {"why": f"not done after {seconds:.0f} s"}
    except ImportError as error:
        return {"why": f"not installed: {error}"[:300]}
    except Exception as error:
        return {"why": f"{type(error).__name__}: {error}"[:300]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Bench:
    """The sizes, and what is measured at them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.shape = (args.batch, args.length, args.dim)
        self.dtype = torch.bfloat16
        self.median = functools.partial(timing.median, device=self.device, repeats=args.repeats)

    def ours(self, name: str) -> Any:
        torch.manual_seed(0)
        return seqzoo.create_mixer(name, self.shape[2]).to(self.device, self.dtype)

    def fla(self, name: str) -> Any:
        layers = importlib.import_module("fla.layers")
        return getattr(layers, name)(hidden_size=self.shape[2], layer_idx=0).to(self.device, self.dtype)

    def x(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def judged(self, layer: Any, run: Callable[..., Any]) -> float:
        """The error of `run`'s output and input gradient against the layer in float64 on the torch backend."""
        x = self.x(1, min(JUDGED, self.shape[1]), self.shape[2])
        weights, found = torch.randn_like(x), []
        for function, t in ((run, x), (copy.deepcopy(layer).double(), x.double())):
            leaf = t.requires_grad_()
            with use_backend("auto" if function is run else "torch"):
                y = function(leaf)[0]
                found.append((y, *torch.autograd.grad(y, leaf, weights.to(y.dtype))))
        error = max(precision.relative_error(a, b) for a, b in zip(*found, strict=True))
        assert precision.worth_timing(error, [x]), f"wrong result: error {error}"
        return error

    def training(self, layer: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
        """Milliseconds, medians, without gradients and with those of the input and all parameters; memory beside theirs."""
        leaf = self.x(*self.shape).requires_grad_()
        weights, parameters = torch.randn_like(leaf), list(layer.parameters())

        def both() -> object:
            y = run(leaf)[0]
            return torch.autograd.grad(y, [leaf, *parameters], weights, allow_unused=True)

        with torch.no_grad():
            row: dict[str, Any] = {"forward": self.median(lambda: run(leaf))}
        row["forward and backward"] = self.median(both)
        row["peak extra MiB"] = timing.peak_memory(both, self.device)
        return row

    def projections(self, name: str) -> dict[str, Any]:
        linears = [m for m in self.ours(name).modules() if isinstance(m, nn.Linear)]
        if not linears:
            return {"why": "it has none"}
        leaves = [self.x(*self.shape[:2], m.in_features).requires_grad_() for m in linears]
        weights = [self.x(*self.shape[:2], m.out_features) for m in linears]

        def forward() -> list[Tensor]:
            return [m(x) for m, x in zip(linears, leaves, strict=True)]

        with torch.no_grad():
            row = {"forward": self.median(forward)}
        wanted = [*leaves, *(p for m in linears for p in m.parameters())]
        row["forward and backward"] = self.median(lambda: torch.autograd.grad(forward(), wanted, weights))
        return row

    def training_of_ours(self, name: str) -> dict[str, Any]:
        layer = self.ours(name)
        return {"error": self.judged(layer, layer), **self.training(layer, layer)}

    def training_compiled(self, name: str) -> dict[str, Any]:
        torch.compiler.reset()
        layer = self.ours(name)
        compiled = torch.compile(layer)
        return {"error": self.judged(layer, compiled), **self.training(layer, compiled)}

    def training_of_fla(self, name: str) -> dict[str, Any]:
        layer = self.fla(name)
        return self.training(layer, layer)

    @torch.no_grad()
    def steps_of_ours(self, name: str) -> dict[str, Any]:
        """Microseconds, B = 1, the state in place: by the clock, eager and of a captured graph."""
        layer = self.ours(name)
        x_t, state = self.x(1, self.shape[2]), layer.init_state(1)
        row = {"step, us": self.clocked(lambda: layer.step(x_t, state, donate=True))}
        if self.device.type == "cuda":
            graph, _ = timing.captured(lambda: layer.step(x_t, state, donate=True))
            row["step in a graph, us"] = self.clocked(graph.replay)
        weights = sum(p.numel() * p.element_size() for p in layer.parameters())
        row["MB of weights"] = round(weights / 1e6, 1)
        row["copy of as many bytes, us"] = round(1e3 * self.median(timing.copy(weights, self.device)), 1)
        return row

    @torch.no_grad()
    def steps_of_fla(self, name: str) -> dict[str, Any]:
        """The same by its own cache, eager; the first step begins it."""
        from fla.models.utils import Cache

        layer, x_t, cache = self.fla(name).eval(), self.x(1, 1, self.shape[2]), Cache()
        return {"step, us": self.clocked(lambda: layer(x_t, past_key_values=cache, use_cache=True))}

    def clocked(self, run: Callable[[], object]) -> float:
        for _ in range(20):
            run()
        start = timing.now(self.device)
        for _ in range(STEPS):
            run()
        return round(1e6 * (timing.now(self.device) - start) / STEPS, 1)


def parts(bench: Bench, only: list[str]) -> list[tuple[dict[str, str], Callable[..., dict[str, Any]], str]]:
    """What to measure, the cheapest to prepare first: labels, function, the layer's name."""
    found: list[tuple[dict[str, str], Callable[..., dict[str, Any]], str]] = []
    if "ours" in only:
        for name in PEERS:
            found += [({"layer": name, "what": "training"}, bench.training_of_ours, name)]
            found += [({"layer": name, "what": "decoding"}, bench.steps_of_ours, name)]
        for name in PEERS:
            found += [({"layer": name, "what": "projections alone"}, bench.projections, name)]
    peers = [peer for peer in PEERS.values() if peer]
    if "fla" in only:
        found += [({"layer": f"fla {peer}", "what": "decoding"}, bench.steps_of_fla, peer) for peer in peers]
        found += [
            ({"layer": f"fla {peer}", "what": "training"}, bench.training_of_fla, peer) for peer in peers
        ]
    if "compiled" in only:
        found += [
            ({"layer": f"{name}, compiled", "what": "training"}, bench.training_compiled, name)
            for name in PEERS
        ]
    return found


def main() -> None:
    """Measure part after part, and print and write each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="ours,fla")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--part", type=float, default=30)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=2048)
    args = parser.parse_args()
    bench, start = Bench(args), time.perf_counter()
    sizes = {"B": args.batch, "T": args.length, "D": args.dim, "dtype": "bfloat16"}
    log = output.Log(args.json, bench.device, sizes=sizes)
    for labels, function, name in parts(bench, args.only.split(",")):
        left = args.seconds - (time.perf_counter() - start)
        if left > 1:
            row = {**labels, **limited(function, min(args.part, left), name)}
        else:
            row = {**labels, "why": f"not begun after {args.seconds:.0f} s"}
        if bench.shape == SIZE and name in PEERS:
            goals = {"training": TRAINING.get(name, {}), "decoding": DECODING}.get(labels["what"], {})
            row |= {f"{what}, target": goal for what, goal in goals.items() if what in row}
        log.add(row)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
