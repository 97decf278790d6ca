import json
import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load as load_torch
from safetensors.torch import save_file

from slackwater.checkpoint.bundles import Batch, batches
from slackwater.checkpoint.codec import EncodedBody, Level
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.shards import build_index, build_shard, cut_shards, read_slots
from slackwater.checkpoint.tensor import TILE_BYTES, Bits, TensorSpec, Tile
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError
from slackwater.weights.diff import compare, encode, hash_source, table_of
from slackwater.weights.glimpse import check_unwritten
from slackwater.weights.image import take_image
from slackwater.weights.source import INDEX_FILE, FolderSource, ShardSource, TensorSource, side_files
from slackwater.weights.state_dict import StateDictSource


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def shard(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def span(dtype: str = "U8", shape: Any = (4,), begin: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def folder(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def test_a_state_dict_gives_the_bits_that_torch_holds() -> None:
    tensors = {
        "nan": torch.tensor([0x7FC1, -32768], dtype=torch.int16).view(torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "strided": torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
        "flags": torch.tensor([True, False]),
        "fp8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 3),
    }
    source = StateDictSource(tensors)
    assert list(source.specs()) == sorted(tensors)
    assert source.bits("nan").tolist() == [0x7FC1, 0x8000]
    assert source.bits("scalar").tolist() == [0x3F800000]
    assert source.bits("strided").tolist() == [0, 3, 1, 4, 2, 5]
    assert source.bits("flags").tolist() == [1, 0]
    assert source.bits("none").size == 0
    assert source.specs()["fp8"] == TensorSpec(name="fp8", dtype="F8_E4M3", shape=(2,))
    with pytest.raises(NotFoundError, match="missing"):
        source.bits("missing")
    with pytest.raises(InvalidInputError, match=r"z: torch\.complex64"):
        StateDictSource({"z": torch.zeros(1, dtype=torch.complex64)})


def test_a1_03_a_tied_head_is_left_out_and_an_untied_one_is_not() -> None:
    weight = torch.zeros(4, 2)
    tied = {"model.embed_tokens.weight": weight, "lm_head.weight": weight}
    assert list(StateDictSource(tied).specs()) == ["model.embed_tokens.weight"]
    untied = {**tied, "lm_head.weight": weight.clone()}
    assert list(StateDictSource(untied).specs()) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_a_folder_gives_the_bits_of_its_files_and_where_they_lie(tmp_path: Path) -> None:
    folder(tmp_path, {"b": bf16(1, 2), "a": bf16(3)})
    for name in ("chat_template.jinja", "tokenizer.json", "notes.bin", ".hidden.json"):
        (tmp_path / name).write_text("x")
    source = FolderSource(tmp_path)
    assert list(source.specs()) == ["a", "b"]
    assert source.bits("b").tolist() == [0x3F80, 0x4000]
    assert list(source.files) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    file, offset = source.place("b")
    assert (tmp_path / file).read_bytes()[offset : offset + 4] == source.bits("b").tobytes()
    with pytest.raises(NotFoundError, match="no tensor c"):
        source.place("c")


def test_a_sharded_folder_follows_its_index(tmp_path: Path) -> None:
    save_file({"a": bf16(1)}, tmp_path / "one.safetensors")
    save_file({"b": bf16(2)}, tmp_path / "two.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    source = FolderSource(tmp_path)
    assert (list(source.specs()), list(source.shards)) == (["a", "b"], ["one.safetensors", "two.safetensors"])
    assert INDEX_FILE in source.files


@pytest.mark.parametrize(
    ("weight_map", "error", "message"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, InvalidInputError, "names b in one.safetensors"),
        ({"a": "gone.safetensors"}, InvalidInputError, "names gone.safetensors"),
        ({"a": "../one.safetensors"}, CorruptError, "weight_map"),
        ({}, InvalidInputError, "without safetensors"),
    ],
)
def test_a1_10_an_index_that_does_not_match_is_refused_by_name(
    tmp_path: Path, weight_map: dict[str, str], error: type[Exception], message: str
) -> None:
    save_file({"a": bf16(1)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error, match=message):
        FolderSource(tmp_path)


def test_a_tensor_outside_the_index_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": bf16(1), "z": bf16(1)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(InvalidInputError, match="doesn't name z"):
        FolderSource(tmp_path)


def test_the_same_tensor_in_two_files_is_refused() -> None:
    one = bytearray(safetensors.numpy.save({"a": np.zeros(1, np.uint8)}))
    with pytest.raises(CorruptError, match=r"a is both in x\.safetensors and in y\.safetensors"):
        ShardSource({"x.safetensors": one, "y.safetensors": one})


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_a8_06_pickled_weights_are_never_opened(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(InvalidInputError, match="a folder without safetensors") as caught:
        FolderSource(tmp_path)
    assert "never read" in caught.value.hint


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    for reader in (FolderSource, side_files):
        with pytest.raises(InvalidInputError, match="is no folder"):
            reader(tmp_path / "missing")


def test_what_a_trainer_notes_beside_a_model_is_no_part_of_it(tmp_path: Path) -> None:
    for name in ("config.json", "trainer_state.json", "all_results.json", "eval_results.json", "my_results.json"):
        (tmp_path / name).write_text("{}")
    assert list(side_files(tmp_path)) == ["config.json", "my_results.json"]


@pytest.mark.parametrize("cut", [1, 4096])
def test_a1_18_a_short_shard_is_named(tmp_path: Path, cut: int) -> None:
    folder(tmp_path, {"a": torch.zeros(4096, dtype=torch.bfloat16)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptError, match=rf"model\.safetensors: it is cut: {cut} bytes of a"):
        FolderSource(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        shard(b"[]"),
        shard(b"{"),
        shard(b"{" + b'"a":{' * 50_000),
        shard({"a": span(end=5)}, b"1234"),
        shard({"a": span(end=3)}, b"1234"),
        shard({"a": span(begin=4, end=0)}, b"1234"),
        shard({"a": span(begin=-1, end=3)}, b"1234"),
        shard({"a": span(shape=(2,), begin=2)}, b"1234"),
        shard({"a": span(), "b": span(begin=2, end=6)}, b"123456"),
        shard({"a": span(), "b": span(begin=5, end=9)}, b"123456789"),
        shard({"a": span()}, b"12345"),
        shard({"a": span(shape=(2**62, 2**62))}, b"1234"),
        shard({"a": span(shape=(2**64,))}, b"1234"),
        shard({"a": span(shape=(-4,))}, b"1234"),
        shard({"a": span(dtype="U9")}, b"1234"),
        shard({"a": {**span(), "more": 1}}, b"1234"),
        shard({"a": span(shape=[1] * 50_000)}, b"1"),
    ],
)
def test_a8_07_a_hostile_header_is_refused_cheaply(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"^bad\.safetensors: "):
            read_slots("bad.safetensors", body)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CorruptError, match=r"model\.safetensors: the file is empty"):
        FolderSource(tmp_path)


def test_what_we_write_is_read_by_safetensors_and_by_us() -> None:
    tensors = {
        "z.weight": bf16(1, -0.0),
        "a.weight": torch.ones(3, 5),
        "e": torch.empty(0, 2),
        "s": torch.tensor(7),
    }
    source = StateDictSource(tensors)
    (plan,) = cut_shards(list(source.specs().values()))
    body = build_shard(plan, source)
    loaded = load_torch(bytes(body))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    again = ShardSource({plan.file: body})
    assert again.specs() == source.specs()
    assert all((again.bits(name) == source.bits(name)).all() for name in tensors)


def test_a_model_beyond_the_limit_is_cut_into_shards_with_an_index() -> None:
    specs = [
        TensorSpec(name=name, dtype="U8", shape=(size,)) for name, size in (("a", 4), ("b", 4), ("c", 9), ("d", 1))
    ]
    plan = cut_shards(specs, 8)
    assert [[spec.name for spec in item.specs] for item in plan] == [["a", "b"], ["c"], ["d"]]
    assert plan[2].file == "model-00003-of-00003.safetensors"
    index = json.loads(build_index(plan))
    assert index["weight_map"]["c"] == "model-00002-of-00003.safetensors"
    assert index["metadata"]["total_size"] == 18


def test_an_image_of_a_folder_keeps_its_shards_byte_for_byte(tmp_path: Path) -> None:
    folder(tmp_path, {"a": bf16(1)})
    image = take_image(FolderSource(tmp_path), {"config.json": b"{}"})
    assert {name: bytes(body) for name, body in image.files.items()} == {
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes(), "config.json": b"{}"
    }  # fmt: skip


def test_an_image_of_a_state_dict_takes_other_files() -> None:
    image = take_image(StateDictSource({"new": bf16(2)}), {"config.json": b"{}"})
    assert sorted(image.files) == ["config.json", "model.safetensors"]
    assert list(image.specs()) == ["new"]


LARGE = TensorSpec(name="a.o_proj.weight", dtype="U8", shape=(3, TILE_BYTES // 2))
"""Cut by column at sixteenths: every tile has 3 rows."""
SMALL = (TensorSpec(name="b", dtype="BF16", shape=(2,)), TensorSpec(name="c", dtype="F32", shape=()))


class _Held:
    """Zeros but for what a test writes."""

    def __init__(self, *specs: TensorSpec) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.weights = {spec.name: np.zeros(spec.num_elements, spec.bits_dtype) for spec in specs}

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def bits(self, name: str) -> Bits:
        return self.weights[name]


def diff(
    new: TensorSource, outline: Outline, old: Mapping[str, Bits], *, level: Level = "fast", threads: int = 1
) -> list[tuple[Batch, list[EncodedBody]]]:
    seen = list(compare(new, outline, old, threads=threads))
    bodies = encode(seen, outline, old, level=level, threads=threads)
    return [(item.batch, made) for item, made in zip(seen, bodies, strict=True)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", ["fast", "wan"])
def test_a_diff_gives_every_batch_in_order_whatever_the_threads(threads: int, level: Level) -> None:
    old, new = _Held(LARGE, *SMALL), _Held(LARGE, *SMALL)
    new.weights[LARGE.name][-1] = 9
    new.weights["c"][0] = 0x7FC00001
    outline = Outline(old.specs().values())
    found = diff(new, outline, old.weights, level=level, threads=threads)
    assert [batch for batch, _ in found] == list(batches(outline, old.specs()))
    made = [tile for _, bodies in found for body in bodies for tile in body.tiles]
    assert [(tile.place.spec.name, tile.place.tile.index, tile.changed) for tile in made] == [
        (LARGE.name, 15, 1),
        ("c", 0, 1),
    ]
    before, after = hash_source(old, threads=threads), hash_source(new, threads=threads)
    numbers = [outline.number(LARGE.name, 15), outline.number("c", 0)]
    assert [tile.pre for tile in made] == before.tiles[numbers].tolist()
    assert [tile.post for tile in made] == after.tiles[numbers].tolist()
    for tile in made:
        index = outline.by_name[tile.place.spec.name]
        assert (int(before.sums[index]) + tile.sum_change) % (1 << 64) == int(after.sums[index])


def test_a_diff_of_a_part_leaves_the_rest_out() -> None:
    old, new = _Held(*SMALL), _Held(SMALL[1])
    new.weights["c"][0] = 1
    ((batch, (body,)),) = diff(new, Outline(SMALL), old.weights)
    assert batch == ((1,),)
    assert [tile.place.spec.name for tile in body.tiles] == ["c"]


def test_what_is_written_after_it_was_compared_is_not_in_the_diff() -> None:
    old, new = _Held(LARGE, *SMALL), _Held(LARGE, *SMALL)
    new.weights[LARGE.name][::100] = 9
    outline = Outline(old.specs().values())
    seen = list(compare(new, outline, old.weights, threads=2))
    expected = hash_source(new, threads=1)
    for bits in new.weights.values():
        bits[:] += 1
    made = encode(seen, outline, old.weights, level="fast", threads=2)
    for tile in (tile for bodies in made for body in bodies for tile in body.tiles):
        assert tile.post == expected.tiles[outline.number(tile.place.spec.name, tile.place.tile.index)]


class _Shown(_Held):
    def shows(self, name: str) -> bool:
        return name in self.weights


@pytest.mark.parametrize("name", [LARGE.name, "b", "c"])
def test_a_tensor_that_was_written_while_the_source_was_read_is_named(name: str) -> None:
    old, new = _Shown(LARGE, *SMALL), _Shown(LARGE, *SMALL)
    seen = [glimpse for item in compare(new, Outline(old.specs().values()), old.weights, threads=1)
            for glimpse in item.glimpses]  # fmt: skip
    check_unwritten(seen, new)
    new.weights[name][::50] ^= 1  # as an optimizer does: a few of all
    with pytest.raises(InvalidInputError, match=f"{name} was written"):
        check_unwritten(seen, new)


def test_a_diff_where_nothing_changed_has_no_bodies() -> None:
    old = _Held(*SMALL)
    assert [bodies for _, bodies in diff(old, Outline(SMALL), old.weights)] == [[]]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_table_has_the_digest_of_every_tile_and_the_sum_of_every_tensor(threads: int) -> None:
    empty = TensorSpec(name="b.none", dtype="F32", shape=(0, 4))
    source = _Held(LARGE, SMALL[0], empty, SMALL[1])
    random = np.random.default_rng(5)
    for bits in source.weights.values():
        bits[:] = random.integers(0, 255, bits.size).astype(bits.dtype)
    table = hash_source(source, threads=threads)
    assert [spec.name for spec in table.outline.specs] == [LARGE.name, "b", "b.none", "c"]
    matrix = source.bits(LARGE.name).reshape(LARGE.shape)
    columns = [np.ascontiguousarray(part).reshape(-1) for part in np.split(matrix, 16, axis=1)]
    assert table.tiles.tolist() == [tile_digest(bits) for bits in (*columns, source.bits("b"), source.bits("c"))]
    assert table.sums.tolist() == [
        element_sum(seed_of(spec.name), Tile(index=0, start=0, cols=spec.num_elements), source.bits(spec.name))
        if spec.num_elements
        else 0
        for spec in table.outline.specs
    ]


def test_a_tensor_that_is_negated_when_it_is_read_is_read_so() -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    source = StateDictSource({"a": whole.conj().imag})
    assert source.bits("a").view(np.float32).tolist() == [-2.0, 4.0]
    assert not source.shows("a")


def test_an_empty_source_has_a_table_all_the_same() -> None:
    table = hash_source(_Held(), threads=1)
    assert (table.tiles.size, table.sums.size) == (0, 0)
    assert table.digest == table_of(Outline(()), []).digest


class _Broken:
    """A source whose third tensor can't be read."""

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(name=name, dtype="U8", shape=(1,)) for name in "abcdef"}

    def bits(self, name: str) -> Bits:
        if name == "c":
            raise InvalidInputError("c is away")
        return np.zeros(1, np.uint8)


def test_a_failing_source_ends_the_diff_and_the_table_with_its_own_error() -> None:
    baseline = {name: np.zeros(1, np.uint8) for name in "abcdef"}
    with pytest.raises(InvalidInputError, match="c is away"):
        diff(_Broken(), Outline(_Broken().specs().values()), baseline, threads=2)
    with pytest.raises(InvalidInputError, match="c is away"):
        hash_source(_Broken(), threads=2)


@pytest.mark.parametrize(
    "value",
    [None, {"a": 1}, torch.empty(2, 2, device="meta"), torch.eye(3).to_sparse()],
    ids=["none", "dict", "meta", "sparse"],
)
def test_what_holds_no_plain_values_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"layer\.extra"):
        StateDictSource({"layer.extra": value})  # type: ignore[dict-item]
