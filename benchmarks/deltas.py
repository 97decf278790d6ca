"""Real deltas for the codec's benchmark: AdamW steps of reinforcement learning on SmolLM2-135M, cast to bf16.

A codec's speed and ratio depend on what changes, so the data is made by the optimizer that users run, on a released
model, and by nothing else: no download, no GPU, about two minutes once per machine. The recipe:

- Base: the weights of the demo's model, spread evenly inside their quantisation step and rounded to bf16.
- Masters in fp32, spread evenly inside the rounding cell of their bf16 value: where long training leaves them.
- One stream of REINFORCE-like gradients (random advantages, normalised in their group) on windows of the standard
  library's source text; AdamW at four learning rates over the same moments.
- A pair is the bf16 cast after step 12 and after step 13.

Seeded throughout. Two machines agree in every statistic, not in every bit: their BLAS and standard library differ.

    python benchmarks/deltas.py     make the data unless it is there, and print each set's statistics
"""

import argparse
import contextlib
import hashlib
import json
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from platformdirs import user_cache_path
from safetensors.torch import save_file
from tokenizers import Tokenizer

from bounds import Bounds, measure
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError, NotFoundError
from slackwater.trainer.recipes.smollm2 import ensure_model, gguf_file, hub_name, rope_halves
from slackwater.weights.source import ShardSource


class DeltaSet(NamedTuple):
    """A benchmark set."""

    name: str
    """After its share of changed elements: ``p142`` is about 1.42 %."""
    lr: float
    """AdamW's learning rate."""


SETS: Final = (DeltaSet("p019", 1e-6), DeltaSet("p050", 3e-6), DeltaSet("p142", 1e-5), DeltaSet("p356", 3e-5))

STEPS: Final = 13
"""Optimizer steps; the pair is the last two snapshots."""

_SEED: Final = 0
_BATCH, _WINDOW = 4, 160
_FILES, _FILE_CHARACTERS = 64, 12_000
_BETA1, _BETA2, _EPSILON, _DECAY, _CLIP = 0.9, 0.999, 1e-8, 0.01, 1.0
_REFRESH: Final = 5
"""Steps between moves of the point that gradients are taken at: the slowest set's masters, which barely move."""
_THREADS: Final = 2
_BLOCK: Final = 32
"""Elements per quantisation block, in Q4_1 and in Q8_0."""
_DIGESTS: Final = "digests.json"
_COMMAND: Final = "python benchmarks/deltas.py"
_FIXTURE_SET: Final = SETS[2]
_FIXTURE: Final = {"model.layers.0.self_attn.v_proj.weight": 192, "model.layers.0.mlp.up_proj.weight": 64}
"""Rows taken of each tensor. 576 columns; together below 600 kB."""
_COLUMNS: Final = 576

Progress = Callable[[str], None]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaPair:
    """Two snapshots of all tensors, by rising name: flat uint16 views of mapped files."""

    old: Mapping[str, Bits]
    new: Mapping[str, Bits]

    def __iter__(self) -> Iterator[tuple[Bits, Bits]]:
        return ((self.old[name], self.new[name]) for name in self.old)


def cache_folder() -> Path:
    """Where the data lies, made or not: about 2.2 GB."""
    return user_cache_path("slackwater") / "bench" / "deltas-v1"


def ensure(progress: Progress) -> Path:
    """Make the data unless it is there: a minute or two, 6 GB of memory. A folder that appears is complete.

    Args:
        progress: Takes a line of text per optimizer step.

    Raises:
        NotFoundError: The package with the model's file is not installed.
        CorruptError: The folder exists and is incomplete.
    """
    folder = cache_folder()
    if (folder / _DIGESTS).is_file():
        return folder
    if folder.exists():
        raise CorruptError(f"{folder} is incomplete", hint=f"remove it and run {_COMMAND}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(_THREADS)
        _generate(scratch, progress)
        digests = {path.name: _digest(path) for path in sorted(scratch.glob("*.safetensors"))}
        (scratch / _DIGESTS).write_text(json.dumps(digests, indent=2) + "\n")
        with contextlib.suppress(OSError):  # another process was first: its folder is as good
            scratch.rename(folder)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def load(name: str) -> DeltaPair:
    """Map one set's pair, after a check of both files against their digests.

    Raises:
        NotFoundError: No such set, or it was not made.
        CorruptError: A file is not the one that was made.
    """
    names = [item.name for item in SETS]
    if name not in names:
        raise NotFoundError(f"there is no set {name}", hint=f"one of {', '.join(names)}")
    return DeltaPair(old=_tensors(f"{name}.old.safetensors"), new=_tensors(f"{name}.new.safetensors"))


def _tensors(file: str) -> Mapping[str, Bits]:
    folder = cache_folder()
    path = folder / file
    hint = f"remove {folder} and run {_COMMAND}"
    if not (folder / _DIGESTS).is_file():
        raise NotFoundError(f"the benchmark's deltas are not in {folder}", hint=f"run {_COMMAND}")
    digests: dict[str, str] = json.loads((folder / _DIGESTS).read_text())
    if file not in digests or not path.is_file():
        raise NotFoundError(f"there is no {file} in {folder}", hint=hint)
    if _digest(path) != digests[file]:
        raise CorruptError(f"{path} is not the file that was made", hint=hint)
    source = ShardSource({file: np.memmap(path, dtype=np.uint8, mode="r")})
    return {tensor: source.bits(tensor) for tensor in source.specs()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _generate(folder: Path, progress: Progress) -> None:
    random = torch.Generator().manual_seed(_SEED)
    model, tokens = _model(folder.parent, random)
    point: Tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    progress(f"base: {len(point)} tensors, {sum(tensor.numel() for tensor in point.values()):,} elements")
    masters = {item: {name: dither(tensor, random) for name, tensor in point.items()} for item in SETS}
    adam = Adam(point)
    for step in range(1, STEPS + 1):
        begun = time.monotonic()
        nll, norm = _backward(model, tokens, random)
        adam.step({name: tensor.grad for name, tensor in model.named_parameters()}, norm, masters)
        if step % _REFRESH == 0:
            for name, tensor in point.items():
                tensor.copy_(masters[SETS[0]][name])
        if step >= STEPS - 1:
            _save(folder, "new" if step == STEPS else "old", masters)
        seconds = time.monotonic() - begun
        progress(f"step {step}/{STEPS}: {nll:.3f} nats per token, gradient norm {norm:.3f}, {seconds:.1f} s")


def _model(work: Path, random: torch.Generator) -> tuple[Any, torch.Tensor]:
    """The model at its base, in fp32, and its training text as tokens."""
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - seconds to import, needed once per machine

    with tempfile.TemporaryDirectory(dir=work) as scratch:
        release = ensure_model(Path(scratch) / "model")
        tokens = _tokens(Tokenizer.from_file(str(release / "tokenizer.json")))
        model: Any = LlamaForCausalLM.from_pretrained(release, dtype=torch.float32)
    model.load_state_dict(dict(_base(model.config, random)), strict=False)  # the tied head has no entry
    return model, tokens


def _save(folder: Path, age: str, masters: Mapping[DeltaSet, Tensors]) -> None:
    for item, values in masters.items():
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in values.items()}
        save_file(rounded, folder / f"{item.name}.{age}.safetensors", metadata={"format": "pt"})


def _base(config: Any, random: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for item in GGUFReader(str(gguf_file())).tensors:
        stored: npt.NDArray[np.float32] = dequantize(item.data, item.tensor_type)
        blocks = stored.reshape(-1, _BLOCK)
        noise = torch.rand(blocks.shape, generator=random).sub_(0.5).numpy()
        values = (blocks + noise * _quantum(blocks, item.tensor_type)).reshape(stored.shape)
        name = hub_name(str(item.name))
        projection = name.split(".")[-2]
        if projection in heads:
            values = rope_halves(values, heads[projection])
        yield name, torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).float()


def _quantum(blocks: npt.NDArray[np.float32], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """The quantisation step of each block, shape [blocks, 1]: as fine as its values show; 0 where unquantised."""
    if kind == GGMLQuantizationType.Q8_0:
        return np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    if kind != GGMLQuantizationType.Q4_1:
        return np.zeros((len(blocks), 1), np.float32)
    gaps = np.diff(np.sort(blocks, axis=1), axis=1)
    smallest = np.where(gaps > 1e-9, gaps, np.inf).min(axis=1, keepdims=True)  # noqa: PLR2004 - rounding, not a gap
    return np.where(np.isfinite(smallest), smallest, 0).astype(np.float32)


def dither(rounded: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Spread fp32 values that bf16 holds exactly over the interiors of their rounding cells; zeros stay.

    A cell is the patterns that differ by less than half of the 16 bits which bf16 drops, at a power of two also.
    """
    bits = rounded.view(torch.int32)
    moved = bits + torch.randint(-0x7FFF, 0x8000, bits.shape, generator=random, dtype=torch.int32)
    return torch.where(rounded == 0, bits, moved).view(torch.float32)


def _tokens(tokenizer: Tokenizer) -> torch.Tensor:
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= _FILE_CHARACTERS:
            texts.append(text[:_FILE_CHARACTERS])
    return torch.tensor(tokenizer.encode("\n".join(texts[:_FILES])).ids)


def _backward(model: Any, tokens: torch.Tensor, random: torch.Generator) -> tuple[float, float]:
    """Leave one batch's gradients in the model; returns nats per token and the gradients' norm."""
    starts = torch.randint(0, len(tokens) - _WINDOW - 1, (_BATCH,), generator=random).tolist()
    batch = torch.stack([tokens[start : start + _WINDOW + 1] for start in starts])
    advantages = torch.randn(_BATCH, generator=random)
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-6)
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    chosen = torch.log_softmax(logits, -1).gather(-1, batch[:, 1:, None])[..., 0]
    torch.autograd.backward(-(chosen * advantages[:, None]).mean())
    squares = [float(tensor.grad.double().square().sum()) for tensor in model.parameters()]
    return -float(chosen.detach().mean()), sum(squares) ** 0.5


class Adam:
    """AdamW (Loshchilov and Hutter, 2019) whose moments drive several sets of masters, each at its learning rate."""

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        self._first = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        self._second = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        self._count = 0

    def step(self, gradients: Mapping[str, Any], norm: float, masters: Mapping[DeltaSet, Tensors]) -> None:
        """Take one step with gradients of this norm, which are clipped to norm 1."""
        self._count += 1
        scale = min(1.0, _CLIP / norm)
        for name, gradient in gradients.items():
            update = self._update(name, gradient * scale)
            for item, values in masters.items():
                values[name].mul_(1 - item.lr * _DECAY).sub_(update, alpha=item.lr)

    def _update(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        first = self._first[name].mul_(_BETA1).add_(gradient, alpha=1 - _BETA1)
        second = self._second[name].mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        root = (second / (1 - _BETA2**self._count)).sqrt_().add_(_EPSILON)
        return (first / (1 - _BETA1**self._count)).div_(root)


def write_fixture(path: Path) -> None:
    """Save a little of a real pair for tests: ``old.<name>`` and ``new.<name>`` in bf16, below 600 kB.

    Raises:
        NotFoundError: The data was not made.
        CorruptError: The data is not what was made.
    """
    pair = load(_FIXTURE_SET.name)
    tensors = {
        f"{age}.{name}": _rows(snapshot[name], rows)
        for age, snapshot in (("old", pair.old), ("new", pair.new))
        for name, rows in _FIXTURE.items()
    }
    about = {
        "model": "SmolLM2-135M-Instruct, the first rows of each tensor",
        "optimizer": "AdamW",
        "lr": _FIXTURE_SET.lr,
        "steps": [STEPS - 1, STEPS],
        "seed": _SEED,
        "set": _FIXTURE_SET.name,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"made": json.dumps(about)})  # one entry: safetensors shuffles several
    path.chmod(0o644)  # safetensors makes files for their owner alone


def _rows(bits: Bits, rows: int) -> torch.Tensor:
    part = np.array(bits[: rows * _COLUMNS]).reshape(rows, _COLUMNS)
    return torch.from_numpy(part.view(np.int16)).view(torch.bfloat16)


def describe(item: DeltaSet, bounds: Bounds) -> str:
    """One line of a set's statistics."""
    one, two, three, more = (100 * share for share in bounds.steps)
    return (
        f"{item.name} lr {item.lr:g}: {100 * bounds.density:.3f} % of {bounds.elements:,} changed; "
        f"|step| 1 {one:.2f} %, 2 {two:.2f} %, 3 {three:.2f} %, more {more:.2f} %; bits per change: "
        f"order 0 {bounds.order0:.2f}, by exponent {bounds.by_exponent:.2f} "
        f"(positions {bounds.positions:.2f} + steps {bounds.values:.2f})"
    )


def main() -> None:
    """Make the data, print its statistics, write the tests' fixture where asked."""
    parser = argparse.ArgumentParser(description="make the codec benchmark's data and print its statistics")
    parser.add_argument("--fixture", type=Path, help="write the tests' small pair to this file too")
    options = parser.parse_args()
    folder = ensure(lambda line: print(line, file=sys.stderr, flush=True))
    print(folder)
    for item in SETS:
        print(describe(item, measure(load(item.name))), flush=True)
    if options.fixture is not None:
        write_fixture(options.fixture)


if __name__ == "__main__":
    main()
