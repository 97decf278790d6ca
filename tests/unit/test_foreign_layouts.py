"""Deltas in foreign layouts, written and read back: the same bits, whatever the layout."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slackwater.checkpoint.foreign.arc import write_arc
from slackwater.checkpoint.foreign.delta import Change, Files
from slackwater.checkpoint.foreign.layouts import LAYOUTS, read_delta, write_delta
from slackwater.checkpoint.foreign.patches import ENCODINGS
from slackwater.checkpoint.foreign.slime import read_slime, write_slime
from slackwater.checkpoint.shards import read_metadata, read_slots
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
    WrongBaseError,
)

INDEX = "model.safetensors.index.json"
DTYPES = ["BF16", "F8_E4M3", "F8_E5M2", "U8", "F32", "BOOL", "I64"]
SHAPES = [(), (0,), (1,), (3, 0), (7,), (5, 6), (2, 3, 4)]


@st.composite
def change_lists(draw: st.DrawFn) -> list[Change]:
    """A model of a few tensors in two states: any dtype, any shape, any bits, any density."""
    changes: list[Change] = []
    for number in range(draw(st.integers(0, 4))):
        spec = TensorSpec(
            name=f"model.{number}.w", dtype=draw(st.sampled_from(DTYPES)), shape=draw(st.sampled_from(SHAPES))
        )
        old, other = (draw(hnp.arrays(spec.bits_dtype, spec.num_elements)) for _ in range(2))
        mask = draw(hnp.arrays(np.bool_, spec.num_elements))
        changes.append(Change(spec=spec, old=old, new=np.where(mask, other, old).astype(spec.bits_dtype)))
    return changes


def bf16(name: str, old: Any, new: Any) -> Change:
    arrays = [np.array(values, dtype="<u2") for values in (old, new)]
    return Change(spec=TensorSpec(name=name, dtype="BF16", shape=arrays[0].shape), old=arrays[0], new=arrays[1])


def write(layout: str, changes: list[Change]) -> Files:
    return write_delta(layout, iter(changes), version="8", base_version="7")


def check_round_trip(layout: str, files: Files, changes: list[Change]) -> None:
    delta = read_delta(layout, files)
    listed = {change.spec.name for change in changes if change.changed or layout.startswith("arc")}
    assert set(delta.tensors) == listed
    for change in changes:
        if change.spec.name in listed:
            once = delta.decode(change.spec, change.old)
            assert once.dtype == change.spec.bits_dtype
            assert once.tobytes() == change.new.tobytes()
            # Adler-32 of small tensors collides; then the second time can't be told from the first.
            if delta.checksum != "adler32":
                assert delta.decode(change.spec, once).tobytes() == change.new.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@given(changes=change_lists())
def test_what_is_written_reads_back_bit_for_bit(layout: str, changes: list[Change]) -> None:
    before = [change.old.tobytes() for change in changes]
    check_round_trip(layout, write(layout, changes), changes)
    assert [change.old.tobytes() for change in changes] == before


@pytest.mark.parametrize("encoding", ENCODINGS.values())
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
@given(changes=change_lists())
def test_slime_reads_back_with_each_encoding_and_checksum(encoding: Any, checksum: str, changes: list[Change]) -> None:
    files = write_slime(changes, version="b", base_version="a", encoding=encoding, checksum=checksum, shard_bytes=40)
    check_round_trip("slime", files, changes)
    assert read_slime(files).checksum == checksum


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_payloads_and_signs_of_zero_count_as_changes(layout: str) -> None:
    change = bf16("w", [0x7FC0, 0x8000, 0x0000, 0x3F80], [0x7FC1, 0x0000, 0x8000, 0x3F80])
    delta = read_delta(layout, write(layout, [change]))
    assert delta.decode(change.spec, change.old).tolist() == [0x7FC1, 0x0000, 0x8000, 0x3F80]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_of_any_kind_is_read(layout: str) -> None:
    change = bf16("w", [1, 2], [1, 3])
    for kind in (bytes, bytearray, memoryview):
        delta = read_delta(layout, {name: kind(raw) for name, raw in write(layout, [change]).items()})
        assert delta.decode(change.spec, change.old).tolist() == [1, 3]


@pytest.mark.parametrize("layout", ["slime", "coreweave", "arc_v1", "arc_v2"])
def test_an_xor_is_never_applied_twice(layout: str) -> None:
    change = bf16("w", np.arange(500), np.arange(500) ^ 1)
    delta = read_delta(layout, write(layout, [change]))
    again = delta.decode(change.spec, change.new)
    assert again is change.new


def test_an_adler32_that_old_and_new_share_does_not_hide_the_change() -> None:
    # Two neighbours up, two down: sums stay, and so does the checksum. One in some thousands of sparse changes does it.
    change = bf16("w", [10, 10, 10, 10], [11, 9, 9, 11])
    for layout in ("coreweave", "arc_v2"):
        delta = read_delta(layout, write(layout, [change]))
        assert delta.decode(change.spec, change.old).tolist() == [11, 9, 9, 11]


@pytest.mark.parametrize("layout", ["slime", "coreweave", "arc_v1", "arc_v2"])
def test_another_base_than_the_delta_was_made_on_is_told(layout: str) -> None:
    change = bf16("w", np.arange(500), np.arange(500) ^ 1)
    delta = read_delta(layout, write(layout, [change]))
    other = change.old.copy()
    other[7] += 1
    with pytest.raises(WrongBaseError, match="w: the result hasn't the"):
        delta.decode(change.spec, other)


@pytest.mark.parametrize("encoding", ENCODINGS.values())
def test_another_base_is_told_with_each_encoding(encoding: Any) -> None:
    change = bf16("w", np.arange(500), np.arange(500) ^ 1)
    delta = read_slime(write_slime([change], version="b", base_version="a", encoding=encoding))
    other = change.old.copy()
    other[7] += 0x100
    with pytest.raises(WrongBaseError):
        delta.decode(change.spec, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_another_tensor_are_refused(layout: str) -> None:
    change = bf16("w", [1, 2], [1, 3])
    delta = read_delta(layout, write(layout, [change]))
    for bits in (np.zeros(3, "<u2"), np.zeros(2, "<u4"), np.zeros((1, 2), "<u2")):
        with pytest.raises(InvalidInputError, match="w has 2 elements of BF16"):
            delta.decode(change.spec, bits)
    with pytest.raises(NotFoundError, match="doesn't list other"):
        delta.decode(TensorSpec(name="other", dtype="BF16", shape=(2,)), change.old)


def test_a_change_of_other_bits_than_its_spec_cannot_be_made() -> None:
    spec = TensorSpec(name="w", dtype="BF16", shape=(2,))
    right: Bits = np.zeros(2, "<u2")
    for wrong in (np.zeros(3, "<u2"), np.zeros(2, "<u4")):
        with pytest.raises(InvalidInputError):
            Change(spec=spec, old=right, new=wrong)
        with pytest.raises(InvalidInputError):
            Change(spec=spec, old=wrong, new=right)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_given_twice_is_refused(layout: str) -> None:
    with pytest.raises(InvalidInputError, match="w comes twice"):
        write(layout, [bf16("w", [1], [2]), bf16("w", [1], [3])])


def test_slime_files_are_what_its_readers_expect() -> None:
    changes = [bf16("a", np.arange(99), np.arange(99) + 1), bf16("still", [4], [4]), bf16("b", [1], [2])]
    files = write_slime(changes, version="000008", base_version="000007", shard_bytes=1)
    names = ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    assert list(files) == [*names, INDEX], "the index is uploaded last"
    assert json.loads(bytes(files[INDEX])) == {
        "metadata": {
            "version": "000008",
            "base_version": "000007",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": {"a": names[0], "b": names[1]},
    }
    loaded = safetensors.numpy.load(bytes(files[names[0]]))
    assert {name: (array.dtype.name, array.ndim) for name, array in loaded.items()} == {"a": ("uint8", 1)}
    assert list(read_metadata(names[0], files[names[0]])) == ["a"]


def test_a_delta_without_changes_is_an_index_alone() -> None:
    files = write("coreweave", [bf16("w", [1], [1])])
    assert list(files) == [INDEX]
    assert read_delta("coreweave", files).tensors == ()


def test_coreweave_has_eight_hex_digits_and_fireworks_a_decimal_number() -> None:
    change = bf16("w", [0, 0], [0, 1])
    files = write("coreweave", [change])
    assert read_metadata("f", files["model-00000-of-00001.safetensors"]) == {"w": "00060002"}
    assert read_metadata("f", write("arc_v2", [change])["model.safetensors"]) == {"w": str(0x00060002)}


@pytest.mark.parametrize(("version", "base"), [("", "7"), ("8", "")])
def test_slime_names_both_versions(version: str, base: str) -> None:
    with pytest.raises(InvalidInputError, match="names its version"):
        write_delta("slime", [], version=version, base_version=base)


def test_arc_keeps_unchanged_tensors_and_the_files_of_the_full_snapshot() -> None:
    changes = [bf16("a", [1, 2], [1, 3]), bf16("b", [4], [4]), bf16("c", [5], [5])]
    weight_map = {"c": "second.safetensors", "a": "first.safetensors", "b": "second.safetensors"}
    files = write_arc(changes, compression="zstd", weight_map=weight_map)
    assert list(files) == ["first.safetensors", "second.safetensors", INDEX]
    assert json.loads(bytes(files[INDEX]))["weight_map"] == weight_map
    delta = read_delta("arc_v2", files)
    assert delta.tensors == ("a", "b", "c")
    assert delta.decode(changes[1].spec, changes[1].old).tolist() == [4]


def test_arc_refuses_a_map_of_other_tensors() -> None:
    for weight_map in ({}, {"a": "f.safetensors", "b": "f.safetensors"}):
        with pytest.raises(InvalidInputError, match="differ in 1 tensors"):
            write_arc([bf16("a", [1], [2])], compression="zstd", weight_map=weight_map)


def test_arc_with_a_file_that_the_index_names_and_nobody_uploaded_is_refused() -> None:
    changes = [bf16("a", [1], [2]), bf16("b", [4], [5])]
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    files = dict(write_arc(changes, compression="zstd", weight_map=weight_map))
    del files["2.safetensors"]
    with pytest.raises(CorruptError, match="disagree about 1 tensors, b among them"):
        read_delta("arc_v2", files)


def test_arc_leaves_other_files_of_the_folder_unread() -> None:
    change = bf16("w", [1], [2])
    files = {**write("arc_v2", [change]), "config.json": b"{}", "training_args.bin": b"\x80\x02junk"}
    assert read_delta("arc_v2", files).decode(change.spec, change.old).tolist() == [2]


def test_a_sparse_patch_is_what_trl_reads() -> None:
    changes = [bf16("a", [1, 2, 3], [1, 9, 8]), bf16("still", [4, 4], [4, 4])]
    files = write_delta("trl", changes, version="42", base_version="41")
    (file,) = files
    assert file == "deltas/step_000042.safetensors"
    loaded = safetensors.numpy.load(
        bytes(write_delta("trl", [as_u16(changes[0])], version="1", base_version="0")["deltas/step_000001.safetensors"])
    )
    assert loaded["a.indices"].dtype == np.int32
    assert loaded["a.indices"].tolist() == [1, 2]
    assert loaded["a.values"].tolist() == [9, 8]
    metadata = read_metadata(file, files[file])
    assert (metadata["sparse"], metadata["model_version"]) == ("True", "42")
    assert json.loads(metadata["changed_params"]) == ["a"]
    assert float(metadata["sparsity"]) == pytest.approx(1 - 2 / 5)


def as_u16(change: Change) -> Change:
    """The same bits under a dtype that numpy has."""
    spec = TensorSpec(name=change.spec.name, dtype="U16", shape=change.spec.shape)
    return Change(spec=spec, old=change.old, new=change.new)


@pytest.mark.parametrize("version", ["", "step-8", "-1", "1.5", "٣"])
def test_a_sparse_patch_counts_steps(version: str) -> None:
    with pytest.raises(InvalidInputError, match="whole number"):
        write_delta("trl", [], version=version, base_version="7")


def test_prime_rl_patches_of_int64_positions_are_read() -> None:
    patch = {"w.indices": np.array([0, 2], np.int64), "w.values": np.array([7, 9], np.uint16)}
    raw = safetensors.numpy.save(patch, metadata={"format": "pt"})
    delta = read_delta("trl", {"delta-00001-of-00002.safetensors": raw, "sparse.json": b"{}"})
    spec = TensorSpec(name="w", dtype="U16", shape=(3,))
    assert delta.version is None
    assert delta.decode(spec, np.array([1, 2, 3], "<u2")).tolist() == [7, 2, 9]


def test_a_layout_without_checksum_says_so() -> None:
    assert read_delta("trl", write("trl", [bf16("w", [1], [2])])).checksum is None


@pytest.mark.parametrize("layout", ["", "arc_v4", "SLIME", "verl"])
def test_an_unknown_layout_is_refused_by_name(layout: str) -> None:
    with pytest.raises(UnsupportedError, match="slime, coreweave, arc_v1, arc_v2, trl"):
        read_delta(layout, {})
    with pytest.raises(UnsupportedError, match="is unknown"):
        write_delta(layout, [], version="1", base_version="0")


def test_arc_v3_is_refused_for_its_pickles() -> None:
    for refused in (
        lambda: read_delta("arc_v3", {}),
        lambda: write_delta("arc_v3", [], version="1", base_version="0"),
    ):
        with pytest.raises(UnsupportedError, match=r"holds pickles.*arc_v2"):
            refused()


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("delta_encoding", "deltas_zstd", "xor, overwrite"),
        ("compression_format", "lz4", "zstd"),
        ("checksum_format", "blake3", "adler32, xxh3-128"),
        ("checksum_format", "", "adler32, xxh3-128"),
        ("checksum_format", "crc32", "adler32, xxh3-128"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(field: str, value: str, hint: str) -> None:
    files = dict(write("slime", [bf16("w", [1], [2])]))
    index = json.loads(bytes(files[INDEX]))
    index["metadata"][field] = value
    with pytest.raises(UnsupportedError, match=hint) as caught:
        read_delta("slime", {**files, INDEX: json.dumps(index).encode()})
    assert value in str(caught.value)


def test_a_full_snapshot_is_no_delta() -> None:
    index = {"metadata": {"total_size": 2}, "weight_map": {"w": "model.safetensors"}}
    with pytest.raises(InvalidInputError, match="full snapshot"):
        read_delta("coreweave", {INDEX: json.dumps(index).encode()})
    anchor = safetensors.numpy.save({"w": np.zeros(2, np.uint16)}, metadata={"sparse": "False", "model_version": "1"})
    with pytest.raises(InvalidInputError, match="full snapshot"):
        read_delta("trl", {"anchors/step_000001.safetensors": anchor})


def test_the_metadata_of_a_shard_is_read_as_safetensors_wrote_it() -> None:
    raw = safetensors.numpy.save({"w": np.zeros(2, np.uint8)}, metadata={"w": "7", "κ": "λ"})
    assert dict(read_metadata("f", raw)) == {"w": "7", "κ": "λ"}
    assert dict(read_metadata("f", safetensors.numpy.save({"w": np.zeros(2, np.uint8)}))) == {}
    assert set(read_slots("f", raw)) == {"w"}


def test_the_snippets_of_the_page_work() -> None:
    page = (Path(__file__).parents[2] / "docs" / "foreign.md").read_text("utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2
    exec("\n".join(snippets), {})
