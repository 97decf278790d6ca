"""Kimi K3 and DeepSeek V4.1 behind the core: answers and routes are those of plain forward passes."""

import json
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_rig import run, steps

from slackwater.checkpoint.tensor import TileWrite, tiles
from slackwater.engine.torch.architectures import Memory
from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.tap import Ids, RouterTap
from slackwater.engine.torch.weights import WeightBits
from slackwater.errors import UnsupportedError
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import TokenStep
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.nemo_toys import NEMO_TOYS, write_nemo_toy
from slackwater.testing.tiny_model import IM_END, TINY_VOCAB, TINY_WINDOW

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(util.find_spec("nemo_automodel") is None, reason="nemo-automodel isn't installed"),
]

PROMPT = tuple(range(3, 24))
MADE = 12


@pytest.fixture(scope="module", params=NEMO_TOYS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nemo_toy(tmp_path_factory.mktemp("toy"), request.param, tokenizer=False, dtype="float32")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder)


def plain(model: LoadedModel, ids: tuple[int, ...], forced: Ids | None = None) -> tuple[torch.Tensor, Ids]:
    """Logits ``[positions, vocab]`` and routes of one pass over all of them."""
    module: Any = model.module
    assert model.routing is not None
    with torch.inference_mode(), RouterTap(model.routers, model.routing).watching(forced) as seen:
        logits = module(input_ids=torch.tensor([ids])).logits[0]
    return logits, seen.chosen(len(ids))


def answered(model: LoadedModel, *, temperature: float, routes: bytes = b"", others: int = 0) -> list[TokenStep]:
    core = Core(model, Shaping(slots=3, invariant=False), window=64, version=Version(7))
    sampling = SamplingSpec(max_tokens=MADE, temperature=temperature, seed=3, ignore_eos=True)
    for key in range(1 + others):
        asked = CompletionRequest(
            request_id=RequestId(f"r{key}"),
            prompt_ids=PROMPT[: len(PROMPT) - key],
            sampling=sampling,
            routes_from=0,
            forced_routes=routes if key == 0 else b"",
        )
        core.add(key, asked, seed=3)
    return steps(run(core), 0)


def sequence(made: list[TokenStep]) -> tuple[int, ...]:
    return (*PROMPT, *(step.token_id for step in made))


def told(model: LoadedModel, made: list[TokenStep]) -> Ids:
    assert model.routing is not None
    rows = b"".join(step.routes or b"" for step in made)
    count = model.routing.check(rows)
    shape = (count, len(model.routing.layers), model.routing.per_token)
    return np.frombuffer(rows, dtype=model.routing.dtype).reshape(shape).astype(np.int64)


def test_a_model_says_what_its_config_does(model: LoadedModel) -> None:
    assert model.memory is Memory.NOTHING
    assert (model.vocab_size, model.window) == (TINY_VOCAB, TINY_WINDOW)
    assert model.eos_token_ids == (IM_END,)
    assert model.dtype is torch.float32
    assert "nemo-automodel 0.7.0" in model.numerics("any")


def test_greedy_tokens_are_the_argmax_of_a_plain_pass(model: LoadedModel) -> None:
    made = answered(model, temperature=0.0, others=2)
    logits, _ = plain(model, sequence(made))
    assert [step.token_id for step in made] == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert len(made) == MADE


def test_log_probabilities_are_those_of_a_plain_pass(model: LoadedModel) -> None:
    made = answered(model, temperature=1.0, others=2)
    logits, _ = plain(model, sequence(made))
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert all(abs(float(row[step.token_id]) - step.logprob) < 1e-4 for row, step in zip(expected, made, strict=True))


def test_routes_tell_of_every_position_but_the_last(model: LoadedModel) -> None:
    """A4-01."""
    made = answered(model, temperature=1.0, others=2)
    _, routes = plain(model, sequence(made))
    rows = told(model, made)
    assert len(rows) == len(PROMPT) + MADE - 1
    assert (np.sort(rows) == np.sort(routes[:-1])).all()


def test_forced_routes_are_taken_in_every_pass(model: LoadedModel) -> None:
    _, natural = plain(model, PROMPT)
    forced = (natural[:5] + 3) % 8
    made = answered(model, temperature=1.0, routes=forced.astype(np.uint8).tobytes())
    padded = np.full((len(sequence(made)), *forced.shape[1:]), -1, dtype=np.int64)
    padded[:5] = forced
    logits, _ = plain(model, sequence(made), padded)
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert (told(model, made)[:5] == forced).all()
    assert all(abs(float(row[step.token_id]) - step.logprob) < 1e-4 for row, step in zip(expected, made, strict=True))


def test_a_swap_of_all_that_a_pass_reads_is_seen_and_undone(model: LoadedModel) -> None:
    weights = WeightBits(model.parameters, model.specs)
    before, _ = plain(model, PROMPT)
    for name in (name for name in model.parameters if name.endswith(("w1.weight", "A_log", "head.weight"))):
        staged = weights.stage([doubled(weights, model, name)])
        weights.commit(staged)
        after, _ = plain(model, PROMPT)
        weights.undo(staged)
        again, _ = plain(model, PROMPT)
        assert torch.equal(again, before)
        assert not torch.equal(after, before) or ".experts." in name, name


def doubled(weights: WeightBits, model: LoadedModel, name: str) -> TileWrite:
    (tile,) = tiles(model.specs[name])
    values = weights.read(name, tile).view(np.float32) * 2
    return TileWrite(name=name, tile=tile, positions=None, values=values.view(np.uint32))


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", "five"), ("hidden_size", 63), ("vocab_size", None)])
def test_a_config_that_makes_no_model_is_refused(folder: Path, tmp_path: Path, field: str, value: object) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"nemo-automodel makes no model of|place the checkpoint"):
        load(tmp_path)
