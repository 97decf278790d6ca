"""Model folders before and after a step, for the benchmark of publishing.

A larger model is made of copies of a real pair, each rotated by its own number of rows: the changes are real, and no
body is another's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from pairs import Pair, States
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.weights.source import INDEX_FILE

CONFIG: Final = '{"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}'

_AGES: Final = ("old", "new")
_TURN: Final = 7
"""Rows by which one copy is rotated against the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model's two folders."""

    name: str
    before: Path
    after: Path


def make(root: Path, name: str, pair: Pair, copies: int) -> Model:
    """Write both states of a model of so many copies of a bf16 pair; a file for each copy."""
    for age, states in zip(_AGES, (pair.old, pair.new), strict=True):
        _write(root / name / age, pair, states, copies)
    before, after = (root / name / age for age in _AGES)
    return Model(name=name, before=before, after=after)


def _write(folder: Path, pair: Pair, states: States, copies: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    weight_map: dict[str, str] = {}
    for number in range(copies):
        file = f"model-{number + 1:05}-of-{copies:05}.safetensors"
        tensors = {f"copies.{number}.{spec.name}": _tensor(spec, states, number) for spec in pair.outline.specs}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _tensor(spec: TensorSpec, states: States, number: int) -> torch.Tensor:
    bits = torch.from_numpy(states[spec.name].view("int16")).view(spec.shape)
    return bits.roll(_TURN * number, 0).view(torch.bfloat16)
