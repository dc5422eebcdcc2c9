"""Checkpoints: safetensors files that are there whole or not at all. Importing this imports safetensors.

A file ``step-00000100.safetensors`` holds the tensors of a run after 100 steps — ``model.…``,
``optimizer.…`` and ``random.…`` — and in its metadata a record in JSON: configuration, position, what the
data was. Nothing in it is code, and nothing is imported on its word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from seqzoo import LanguageModel, TokenMixer, mixer_from_config
from seqzoo.lab.errors import LabError
from seqzoo.lab.folder import write_whole
from seqzoo.lab.train import Trainer

FORMAT = "seqzoo checkpoint 1"
NAME = re.compile(r"step-(\d{8,})\.safetensors")
OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter
Record = dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, in a folder of their own, of which the newest ``keep`` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise LabError(f"keep: expected 1 or more, got {keep}")
        self.folder = folder
        self.keep = keep

    def paths(self) -> list[Path]:
        """The finished ones, oldest first."""
        steps = {path: match for path in self.folder.glob("step-*") if (match := NAME.fullmatch(path.name))}
        return sorted(steps, key=lambda path: int(steps[path][1]))

    def newest(self) -> Path | None:
        """The one to go on from."""
        return next(reversed(self.paths()), None)

    def save(self, trainer: Trainer, record: Record) -> None:
        """Write where the run stands, then remove what is too old. LabError, in every process, if that fails
        or if there are numbers that are not finite."""
        tensors = run_tensors(trainer)
        for name, value in tensors.items():
            if not value.isfinite().all():
                raise LabError(f"{name} has numbers that are not finite after step {trainer.step}")
        path = self.folder / f"step-{trainer.step:08}.safetensors"

        def write() -> None:
            try:
                write_checkpoint(path, tensors, record)
                for old in self.paths()[: -self.keep]:
                    old.unlink()
            except OSError as error:
                raise LabError(f"checkpoint: {path} could not be written: {error.strerror}") from error

        trainer.processes.only_first(write)

    def last_one(self) -> str:
        """What remains after a failure, as the end of a sentence."""
        newest = self.newest()
        return f"the last checkpoint is {newest}" if newest else "there is no checkpoint yet"

    def clear(self, *, finished: bool) -> None:
        """Remove what a killed run had half written, and if asked the finished ones."""
        for path in [*self.folder.glob("step-*.partial"), *(self.paths() if finished else [])]:
            path.unlink()


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], record: Record) -> None:
    """Write a checkpoint, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(dict(tensors), {"format": FORMAT, "record": json.dumps(record)}))


def read_checkpoint(path: Path, part: str = "") -> tuple[Record, dict[str, Tensor]]:
    """The record of a checkpoint and its tensors, or those of one part, such as "model", by their own names.

    Raises LabError for a file that is no whole checkpoint.
    """
    if not path.is_file():
        raise LabError(f"checkpoint: {path} is not there")
    prefix = part and part + "."
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                found = metadata.get("format", "no format")
                raise LabError(f"checkpoint: {path} is not of seqzoo train: it has {found!r}, not {FORMAT!r}")
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        return json.loads(metadata["record"]), tensors
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise LabError(f"checkpoint: {path} is cut short, damaged or of another kind: {error}") from error


def run_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all tensors that a run goes on from. All processes call it together."""
    tensors = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors["random.cpu"] = trainer.processes.gather(torch.get_rng_state())
    if trainer.device.type == "cuda":
        tensors["random.cuda"] = trainer.processes.gather(torch.cuda.get_rng_state(trainer.device))
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def restore_run(trainer: Trainer, path: Path) -> Record:
    """Put a fresh trainer of the same model where the checkpoint stands; its record."""
    record, tensors = read_checkpoint(path)
    rank = trainer.processes.rank
    try:
        # copied into the fresh tensors: products of other alignment may round otherwise
        trainer.model.load_state_dict(
            {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}
        )
        for name, parameter in trainer.model.named_parameters():
            names = {key: f"optimizer.{key}.{name}" for key in OPTIMIZER_STATE}
            if tensors.keys().isdisjoint(names.values()):
                continue  # it has had no gradient yet
            for key, full_name in names.items():
                value = tensors[full_name]
                if value.shape != (() if key == "step" else parameter.shape):
                    raise KeyError(f"{full_name} has the shape {tuple(value.shape)}")
                trainer.optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
        trainer.step, trainer.seconds = int(record["step"]), float(record["seconds"])
        trainer.metric = float("nan" if record["metric"] is None else record["metric"])
        if rank < len(tensors["random.cpu"]):
            torch.set_rng_state(tensors["random.cpu"][rank].clone())
        if trainer.device.type == "cuda" and rank < len(tensors.get("random.cuda", ())):
            torch.cuda.set_rng_state(tensors["random.cuda"][rank].clone(), trainer.device)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"checkpoint: {path} does not fit this model: {error}") from error
    return record


def load_model(
    path: str | Path, *, mixers: Sequence[type[TokenMixer]] = (), device: str = "cpu"
) -> LanguageModel:
    """The trained model of a checkpoint, or of the newest one in the folder of a run.

    ``mixers`` are classes of yours, which a checkpoint may name but never has imported. Raises LabError for a
    file that is no whole checkpoint, or a mixer that is not known.
    """
    path = find_checkpoint(Path(path))
    record, tensors = read_checkpoint(path, "model")
    try:
        config = record["model"]
        specs = [_own_class(spec, mixers) for spec in config["mixer"]]
        with torch.device("meta"):  # a size that the tensors do not have costs nothing
            model = LanguageModel(**{**config, "mixer": specs})
            wrong = {
                name
                for name, value in model.state_dict().items()
                if name not in tensors or tensors[name].shape != value.shape
            }
        if wrong:
            raise ValueError(f"{min(wrong)} has another shape than the configuration says, or is missing")
        model = model.to_empty(device=device)
        model.load_state_dict(tensors)
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise LabError(f"checkpoint: {path} has a model that cannot be built: {error}") from error
    return model.eval()


def find_checkpoint(path: Path) -> Path:
    """A checkpoint's own path, or the newest in the folder of a run."""
    if not path.is_dir():
        return path
    newest = Checkpoints(path / "checkpoints", 1).newest() or Checkpoints(path, 1).newest()
    if newest is None:
        raise LabError(f"checkpoint: {path} has no finished checkpoint in it")
    return newest


def _own_class(spec: Mapping[str, Any], mixers: Sequence[type[TokenMixer]]) -> Mapping[str, Any]:
    """A mixer's configuration, with the class in place of a name that only the user may have imported."""
    name = spec["name"]
    for cls in mixers:
        if name == f"{cls.__module__}:{cls.__qualname__}":
            return {**spec, "name": cls}
    if ":" in name:
        raise ValueError(
            f"it names {name!r}, and nothing is imported on a file's word: if you trust that code, "
            f"give it yourself (--mixer {name})"
        )
    with torch.device("meta"):
        mixer_from_config(spec)
    return spec
