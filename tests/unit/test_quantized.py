"""A trainer's export, shown as each release serves it."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from release_layouts import TABLES, Release, release

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.weights.quantize.formats import FP8_F32, MXFP4
from slackwater.weights.quantize.quantizer import Quantizer
from slackwater.weights.quantized import QuantizedSource
from slackwater.weights.source import FolderSource, TensorSource
from slackwater.weights.state_dict import StateDictSource

every_release = pytest.mark.parametrize("name", TABLES)


def read(source: TensorSource) -> dict[str, Bits]:
    return {name: source.bits(name) for name in source.specs()}


def spec(name: str, dtype: str, *shape: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name=name, dtype=dtype, shape=shape)}


def export(**tensors: torch.Tensor) -> StateDictSource:
    return StateDictSource({name.replace("__", "."): tensor for name, tensor in tensors.items()})


class CountingSource:
    """A source that lists what was read of it."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.read: list[str] = []

    def specs(self) -> Mapping[str, TensorSpec]:
        return self.source.specs()

    def bits(self, name: str) -> Bits:
        self.read.append(name)
        return self.source.bits(name)


@every_release
def test_an_export_has_the_anchors_names_dtypes_and_shapes(name: str, tmp_path: Path) -> None:
    tiny = release(name)
    source = tiny.source()
    assert source.specs() == dict(sorted(tiny.serving.items()))
    assert all(source.bits(part).size == spec.num_elements for part, spec in source.specs().items())
    tiny.write(tmp_path)
    folder = FolderSource(tmp_path)
    assert folder.specs() == source.specs()
    assert all(np.array_equal(folder.bits(part), bits) for part, bits in read(source).items())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1024 * 1024


def blocks_of(quantizer: Quantizer, moved: torch.Tensor) -> torch.Tensor:
    """Elements whose block holds a moved element."""
    height, width = quantizer.block
    rows, cols = moved.shape
    padded = torch.nn.functional.pad(moved, (0, -cols % width, 0, -rows % height))
    per_block = padded.view(padded.shape[0] // height, height, -1, width).any(3).any(1)
    return per_block.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :cols]


def check_step(before: Release, after: Release, held: Mapping[str, Bits], found: Mapping[str, Bits]) -> int:
    """Blocks without a moved value keep codes and scale; how many bytes of codes and scales changed."""
    changed_bytes = 0
    for weight, quantizer in before.quantizers.items():
        old, new = before.export[weight], after.export[weight]
        moved = blocks_of(quantizer, old.view(torch.int16) != new.view(torch.int16))
        codes, scales = quantizer.parts(weight, (old.shape[0], old.shape[1]))
        height, width = quantizer.block
        changed = torch.from_numpy(held[codes] != found[codes]).view(len(old), -1)
        rescaled = torch.from_numpy(held[scales] != found[scales]).view(-(-old.shape[0] // height), -1)
        assert not (changed.repeat_interleave(quantizer.codes.per_byte, 1) & ~moved).any(), weight
        assert not (rescaled & ~moved[::height, ::width]).any(), weight
        changed_bytes += int(changed.sum() + rescaled.sum())
    return changed_bytes


@every_release
def test_after_a_step_only_blocks_whose_values_moved_change(name: str) -> None:
    before = release(name)
    after = before.after_step(lr=1e-5)
    held = read(before.source())
    found = read(QuantizedSource(StateDictSource(after.export), before.serving, held.__getitem__))
    assert check_step(before, after, held, found) > 0 or not before.quantizers
    for part, bits in found.items():
        if part in before.export and part not in before.quantizers:
            assert np.array_equal(bits != held[part], changed_values(before, after, part)), part


def changed_values(before: Release, after: Release, name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return (before.export[name].view(torch.int16) != after.export[name].view(torch.int16)).reshape(-1).numpy()


@every_release
def test_an_export_of_what_is_served_changes_nothing(name: str) -> None:
    tiny = release(name)
    held = read(tiny.source())
    served = dict(tiny.export)
    for weight, quantizer in tiny.quantizers.items():
        rows, cols = served[weight].shape
        served[weight] = quantizer.dequantize(weight, (rows, cols), held).to(torch.bfloat16)
    found = read(QuantizedSource(StateDictSource(served), tiny.serving, held.__getitem__))
    assert all(np.array_equal(bits, held[part]) for part, bits in found.items())


@every_release
def test_what_the_export_lacks_is_absent(name: str) -> None:
    tiny = release(name)
    kept = dict(list(tiny.export.items())[::2])
    source = QuantizedSource(StateDictSource(kept), tiny.serving)
    whole = tiny.source()
    assert 0 < len(source.specs()) < len(tiny.serving)
    assert all(np.array_equal(bits, whole.bits(part)) for part, bits in read(source).items())


def test_a_weight_is_read_and_quantised_once_for_all_its_parts() -> None:
    tiny = release("deepseek-v4.1-flash")
    counting = CountingSource(StateDictSource(tiny.export))
    read(QuantizedSource(counting, tiny.serving))
    assert sorted(counting.read) == sorted(tiny.export)


def test_parts_may_be_read_from_many_threads() -> None:
    tiny = release("kimi-k3")
    wanted, source = read(tiny.source()), tiny.source()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(source.bits, wanted))
    assert all(np.array_equal(*pair) for pair in zip(found, wanted.values(), strict=True))


def test_it_tells_which_quantiser_makes_which_tensor() -> None:
    source = release("kimi-k3").source()
    assert {quantizer.name for quantizer in source.quantizers.values()} == {MXFP4.name}
    assert all("experts" in part and source.specs()[part].dtype == "U8" for part in source.quantizers)


def test_a_mapped_export_is_quantised_where_it_lies(tmp_path: Path) -> None:
    plain = release("qwen3.5-9b")
    plain.write(tmp_path)
    names = [name for name in plain.export if name.endswith("mlp.up_proj.weight")]
    serving = dict(plain.serving)
    for name in names:
        serving.update(FP8_F32.parts(name, (224, 160)))
    source = QuantizedSource(FolderSource(tmp_path), serving)
    for name in names:
        wanted = FP8_F32.quantize(name, plain.export[name])
        assert all(np.array_equal(source.bits(part), bits) for part, bits in wanted.items())


def test_bf16_becomes_f32_bit_by_bit_where_the_anchor_holds_f32() -> None:
    patterns = torch.tensor([0x3F80, 0x7FC1, -32768, 0x7F80, 1, -1], dtype=torch.int16)
    source = QuantizedSource(export(m__A_log=patterns.view(torch.bfloat16)), spec("m.A_log", "F32", 6))
    assert source.specs()["m.A_log"].dtype == "F32"
    assert source.bits("m.A_log").tolist() == [
        0x3F800000, 0x7FC10000, 0x80000000, 0x7F800000, 0x00010000, 0xFFFF0000,
    ]  # fmt: skip


def test_codes_and_scales_that_the_trainer_made_pass_through() -> None:
    made = MXFP4.quantize("a.weight", torch.ones(2, 32))
    parts = {name: torch.from_numpy(bits.copy()) for name, bits in made.items()}
    parts = {
        "a.weight_packed": parts["a.weight_packed"].view(2, 16),
        "a.weight_scale": parts["a.weight_scale"].view(2, 1),
    }
    source = QuantizedSource(StateDictSource(parts), MXFP4.parts("a.weight", (2, 32)))
    assert not source.quantizers
    assert all(np.array_equal(source.bits(name), bits) for name, bits in made.items())


BF16, F32 = torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(4, 32)
REFUSED = [
    (F32, spec("a.weight", "BF16", 4, 32), r"F32 \[4, 32\] in the export and BF16 .*cast it to BF16"),
    (BF16, spec("a.weight", "F16", 4, 32), "cast it to F16"),
    (BF16.half(), spec("a.weight", "F32", 4, 32), "cast it to F32"),
    (BF16, spec("a.weight", "BF16", 32, 4), r"BF16 \[32, 4\] in the anchor"),
    (BF16, spec("a.weight", "F32", 128), r"F32 \[128\] in the anchor"),
    (BF16, spec("b.weight", "BF16", 4, 32), "no such tensor"),
    (BF16, FP8_F32.parts("a.weight", (4, 64)), r"codes are of \[4, 64\]"),
    (BF16.view(-1), FP8_F32.parts("a.weight", (4, 32)), r"codes are of \[4, 32\]"),
    (BF16, spec("a.weight", "F8_E4M3", 4, 32), r"F8_E4M3 \[4, 32\] in the anchor .*a known kind"),
    (BF16.to(torch.int16), MXFP4.parts("a.weight", (4, 32)), "no such tensor"),
]


@pytest.mark.parametrize(("tensor", "serving", "message"), REFUSED)
def test_what_does_not_fit_the_anchor_is_refused_by_name(
    tensor: torch.Tensor, serving: Mapping[str, TensorSpec], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"^a\.weight is .*{message}"):
        QuantizedSource(export(a__weight=tensor), serving)


def test_a_weight_in_floats_and_its_scales_are_refused_together() -> None:
    serving = FP8_F32.parts("a.weight", (4, 32))
    tensors = {"a.weight": BF16, "a.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(InvalidInputError, match=r"^a\.weight_scale_inv .*export a weight either in floats or as codes"):
        QuantizedSource(StateDictSource(tensors), serving)


def test_a_diverged_weight_is_named_when_it_is_read() -> None:
    broken = BF16.clone()
    broken[3, 31] = float("nan")
    source = QuantizedSource(export(a__weight=broken), MXFP4.parts("a.weight", (4, 32)))
    with pytest.raises(InvalidInputError, match=r"^a\.weight holds NaN"):
        source.bits("a.weight_scale")


def test_names_that_only_the_export_has_are_not_found() -> None:
    source = QuantizedSource(export(a__weight=BF16), MXFP4.parts("a.weight", (4, 32)))
    for name in ("a.weight", "b"):
        with pytest.raises(NotFoundError, match=f"makes no {name}"):
            source.bits(name)
