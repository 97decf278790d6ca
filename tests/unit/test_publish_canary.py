"""Canaries in a bucket: committed with their version, covered by its signature, and no part of its state."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, restored, trained, weights

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.canary import Canary, first_off
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import CorruptError, InvalidInputError, SlackwaterError
from slackwater.ids import Version
from slackwater.publish.delta import tell_nobody
from slackwater.publish.exchange import ThreadExchange, thread_exchanges
from slackwater.publish.fold import fold
from slackwater.publish.history import read_history
from slackwater.publish.lineage import read_manifest
from slackwater.publish.merge import share_out
from slackwater.publish.published import Published
from slackwater.publish.publisher import Publisher
from slackwater.publish.ranks import RankPublisher
from slackwater.publish.rollback import rollback
from slackwater.publish.signed import SignedBucket
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.state_dict import StateDictSource

SIGNER = Signer(bytes(range(32)))
TRUSTED = TrustedKeys([SIGNER.public_key])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def canary(step: int) -> Canary:
    return Canary(prompt=(1, 2, step), tokens=(3, 4), logprobs=(-0.1 * step, -1e-7), tolerance=0.25)


def canary_of(bucket: Bucket, version: int) -> Canary | None:
    return read_manifest(bucket, RUN, Version(version)).canary


def run_with_canaries(model: Path, count: int = 4, *, signer: Signer | None = None) -> MemoryBucket:
    """Versions of which each has a canary of its own, but for version 2, which has none."""
    bucket, tensors = MemoryBucket(), weights()
    with Publisher(bucket, RUN, anchor_every=3, signer=signer, clock=ManualClock()) as publisher:
        for step in range(count):
            wanted = None if step == 2 else canary(step)
            publisher.publish(StateDictSource(tensors), step=step, folder_files=model, canary=wanted)
            tensors = trained(tensors, step)
    return bucket


def test_anchors_and_deltas_carry_the_canary_that_they_were_published_with(model: Path, tmp_path: Path) -> None:
    bucket = run_with_canaries(model)
    assert [read_manifest(bucket, RUN, Version(version)).kind for version in range(4)] == [
        "anchor", "delta", "delta", "anchor",
    ]  # fmt: skip
    assert [canary_of(bucket, version) for version in range(4)] == [canary(0), canary(1), None, canary(3)]
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache", threads=1)
    assert [fetcher.manifest(Version(version)).canary for version in (1, 2)] == [canary(1), None]
    assert [entry.has_canary for entry in read_history(bucket, RUN)] == [True, True, False, True]


def test_a_canary_changes_nothing_but_its_own_member(model: Path) -> None:
    plain, tensors = MemoryBucket(), weights()
    with Publisher(plain, RUN, anchor_every=3, clock=ManualClock()) as publisher:
        for step in range(4):
            publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
            tensors = trained(tensors, step)
    bucket = run_with_canaries(model)
    assert keys(bucket) == keys(plain)
    for key in keys(plain):
        if "/manifests/" not in key:
            assert bucket.get(key, max_bytes=2**20) == plain.get(key, max_bytes=2**20)
    for version in range(4):
        without = msgspec.structs.replace(read_manifest(bucket, RUN, Version(version)), canary=None)
        assert encode_manifest(without) == plain.get(manifest_key(RUN, Version(version)), max_bytes=2**20)


def test_a_version_in_the_background_has_its_own_canary(model: Path) -> None:
    bucket, tensors = MemoryBucket(), weights()
    with Publisher(bucket, RUN) as publisher:
        for step in range(3):
            publisher.publish_async(StateDictSource(tensors), step=step, folder_files=model, canary=canary(step))
            tensors = trained(tensors, step)
    assert [canary_of(bucket, version) for version in range(3)] == [canary(0), canary(1), canary(2)]


def by_ranks(bucket: MemoryBucket, states: Sequence[Tensors], model: Path, canaries: Sequence[Any]) -> list[object]:
    """Publish states by as many ranks as there are canaries for each; what each rank's last call returned or raised."""
    world = len(canaries[0])

    def publish(rank: int, exchange: ThreadExchange) -> Published | SlackwaterError:
        publisher = RankPublisher(bucket, RUN, rank, world, exchange, anchor_every=2, threads=1)
        try:
            return [
                publisher.publish(
                    StateDictSource(share(state, world)[rank]), step=0, folder_files=model, canary=of[rank]
                )
                for state, of in zip(states, canaries, strict=True)
            ][-1]
        except SlackwaterError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(publish, range(world), thread_exchanges(world, 60)))


def share(tensors: Tensors, world: int) -> list[Tensors]:
    shares = share_out(StateDictSource(tensors).specs().values(), world)
    return [{name: tensors[name] for name in names} for names in shares]


@pytest.mark.parametrize("world", [1, 3])
def test_of_several_ranks_canaries_that_of_rank_0_is_committed(model: Path, world: int) -> None:
    bucket, states = MemoryBucket(), [weights(), trained(weights(), 1), trained(weights(), 2)]
    others = [[canary(10 * step + rank) for rank in range(1, world)] for step in range(3)]
    given = [[first, *rest] for first, rest in zip((canary(7), None, canary(8)), others, strict=True)]
    results = by_ranks(bucket, states, model, given)
    assert [type(result) for result in results] == [Published] * world
    assert [read_manifest(bucket, RUN, Version(version)).kind for version in range(3)] == ["anchor", "delta", "anchor"]
    assert [canary_of(bucket, version) for version in range(3)] == [canary(7), None, canary(8)]


def test_where_rank_0_is_given_something_else_all_ranks_fail_and_nothing_is_sent(model: Path) -> None:
    bucket = MemoryBucket()
    results = by_ranks(bucket, [weights()], model, [[{"prompt": [1]}, canary(1)]])
    assert [type(result) for result in results] == [InvalidInputError] * 2
    assert keys(bucket) == []


def test_what_is_no_canary_is_refused_before_anything_is_sent(model: Path) -> None:
    bucket = MemoryBucket()
    slip: Any = {"prompt": [1], "tokens": [2], "logprobs": [-1.0]}
    with Publisher(bucket, RUN) as publisher:
        for publish in (publisher.publish, publisher.publish_async):
            with pytest.raises(InvalidInputError, match="dict is no canary"):
                publish(StateDictSource(weights()), step=0, folder_files=model, canary=slip)
        assert keys(bucket) == []
        assert publisher.publish(StateDictSource(weights()), step=0, folder_files=model).version == 0


def with_vocabulary(model: Path, size: object) -> Path:
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": size}))
    return model


@pytest.mark.parametrize("field", ["prompt", "tokens"])
def test_an_id_that_the_model_does_not_have_is_refused_before_anything_is_sent(model: Path, field: str) -> None:
    bucket, folder = MemoryBucket(), with_vocabulary(model, 64)
    slip = msgspec.structs.replace(canary(1), **{field: (5, 64)})
    with Publisher(bucket, RUN) as publisher:
        for publish in (publisher.publish, publisher.publish_async):
            with pytest.raises(InvalidInputError, match=rf"canary.{field}: number 1 is token id 64.* up to 63") as told:
                publish(StateDictSource(weights()), step=0, folder_files=folder, canary=slip)
            assert f"{folder / 'config.json'} has vocab_size 64" in told.value.message
        assert keys(bucket) == []
        last = msgspec.structs.replace(canary(1), **{field: (5, 63)})
        assert publisher.publish(StateDictSource(weights()), step=0, folder_files=folder, canary=last).version == 0
        with pytest.raises(InvalidInputError, match="token id 64"):
            publisher.publish(StateDictSource(trained(weights(), 1)), step=1, folder_files=folder, canary=slip)
    assert read_history(bucket, RUN)[-1].version == 0


@pytest.mark.parametrize("size", [None, "64", 0, -1, True])
def test_a_config_that_does_not_say_how_many_ids_there_are_bounds_none(model: Path, size: object) -> None:
    bucket, wanted = MemoryBucket(), canary(2**31 - 1)
    with Publisher(bucket, RUN) as publisher:
        publisher.publish(
            StateDictSource(weights()), step=0, folder_files=with_vocabulary(model, size), canary=wanted
        )  # fmt: skip
        publisher.publish(StateDictSource(trained(weights(), 1)), step=1, canary=wanted)
    assert [canary_of(bucket, version) for version in range(2)] == [wanted, wanted]


def test_an_id_that_rank_0s_model_does_not_have_fails_all_ranks_and_nothing_is_sent(model: Path) -> None:
    bucket = MemoryBucket()
    results = by_ranks(bucket, [weights()], with_vocabulary(model, 64), [[canary(64), None]])
    assert [type(result) for result in results] == [InvalidInputError] * 2
    assert all("token id 64" in str(result) for result in results)
    assert keys(bucket) == []


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize(("to", "wanted"), [(1, canary(1)), (2, None)])
def test_a_roll_back_publishes_the_old_versions_canary_again(
    model: Path, tmp_path: Path, to: int, wanted: Canary | None, *, anchor: bool
) -> None:
    bucket, scratch = run_with_canaries(model), tmp_path / "scratch"
    scratch.mkdir()
    rollback(
        bucket, RUN, Version(to),
        scratch=scratch, level="fast", threads=1, progress=tell_nobody, anchor=anchor, clock=ManualClock(),
    )  # fmt: skip
    assert canary_of(bucket, 4) == wanted
    assert restored(bucket, 4) == restored(bucket, to)


@pytest.mark.parametrize(("end", "wanted"), [(2, None), (3, canary(3))])
def test_a_fold_has_the_canary_of_the_version_that_it_leads_to(
    model: Path, tmp_path: Path, end: int, wanted: Canary | None
) -> None:
    bucket, scratch = run_with_canaries(model), tmp_path / "scratch"
    scratch.mkdir()
    folded = fold(
        bucket, RUN, Version(0), Version(end), scratch=scratch, level="fast", threads=1, progress=tell_nobody
    )  # fmt: skip
    assert folded.is_new
    assert folded.manifest.canary == wanted


def test_a_signature_covers_the_canary(model: Path) -> None:
    bucket = run_with_canaries(model, 2, signer=SIGNER)
    signed = SignedBucket(bucket, TRUSTED)
    assert canary_of(signed, 1) == canary(1)
    key, manifest = manifest_key(RUN, Version(1)), read_manifest(bucket, RUN, Version(1))
    for forged in (None, canary(2), msgspec.structs.replace(canary(1), tolerance=100.0)):
        bucket.put(key, encode_manifest(msgspec.structs.replace(manifest, canary=forged)))
        assert canary_of(bucket, 1) == forged
        with pytest.raises(CorruptError, match="signed"):
            canary_of(signed, 1)


def test_a_trainers_forward_pass_makes_one_that_the_same_pass_meets_and_a_wrong_tensor_does_not(model: Path) -> None:
    tensors, prompt, tokens = weights(), [3, 1, 4, 1, 5], [9, 2, 6]

    def scores() -> list[float]:
        """A bigram model: each token's logits are its own embedding's with all the others."""
        embedding = tensors["model.embed_tokens.weight"].float()
        ids = torch.tensor([[*prompt, *tokens]])
        logits = (embedding @ embedding.T)[ids][0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()

    bucket = MemoryBucket()
    made = Canary(prompt=tuple(prompt), tokens=tuple(tokens), logprobs=tuple(scores()))
    with Publisher(bucket, RUN) as publisher:
        publisher.publish(StateDictSource(tensors), step=0, folder_files=model, canary=made)
    assert restored(bucket, 0) == all_bits(StateDictSource(tensors))
    read = canary_of(bucket, 0)
    assert read is not None
    assert first_off(read, scores()) is None
    tensors["model.embed_tokens.weight"][5] += 0.5
    assert "token 1 of 3, id 9, has log-probability" in (first_off(read, scores()) or "")
