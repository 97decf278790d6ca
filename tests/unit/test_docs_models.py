"""The page of models agrees with the layouts that the project is tested with: names, dtypes, shapes, groups."""

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from release_layouts import TABLES, Release, release

from slackwater.checkpoint.groups import groups
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.weights.quantize.formats import QUANTIZERS
from slackwater.weights.quantize.quantizer import Quantizer

PAGE: Final = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")

Fields = Mapping[str, float]

_MLA: Final[Fields] = {
    "vocab_size": 96, "hidden_size": 160, "q_lora_rank": 32, "kv_lora_rank": 32,
    "index_head_dim": 32, "index_n_heads": 2,
    "num_attention_heads": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8,
    "intermediate_size": 288, "moe_intermediate_size": 136, "n_routed_experts": 2, "n_shared_experts": 1,
}  # fmt: skip

FIELDS: Final[Mapping[str, Fields]] = {
    "qwen3.5-9b": {
        "vocab_size": 96, "hidden_size": 160, "intermediate_size": 224,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 4,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    },
    "glm-5.2": _MLA,
    "glm-5.3-flash": {
        **_MLA, "linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "hc_mult": 2,
        "index_kpool": 4,
    },
    "kimi-k3": {
        **_MLA, "num_attention_heads": 4, "qk_nope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 96,
        "moe_intermediate_size": 128, "routed_expert_hidden_size": 96, "num_experts": 3, "num_shared_experts": 1 / 2,
        "linear_attn_config.num_heads": 4, "linear_attn_config.head_dim": 16,
        "linear_attn_config.short_conv_kernel_size": 4,
    },
    "deepseek-v4.1-flash": {
        "vocab_size": 96, "hidden_size": 160, "q_lora_rank": 48, "num_attention_heads": 4, "head_dim": 64,
        "o_groups": 2, "o_lora_rank": 32, "hc_mult": 2, "index_n_heads": 4, "index_head_dim": 32,
        "moe_intermediate_size": 64, "n_routed_experts": 3, "n_shared_experts": 72 / 64,
    },
}  # fmt: skip
"""What the configs of the tiny layouts would say; their shared experts have widths of their own."""

OTHER_SHAPES: Final = {"layers.1.attn.indexer.wk.weight"}
"""Where a tiny layout is wider than the release's formula."""

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a model's table."""

    pattern: str
    names: tuple[re.Pattern[str], ...]
    """One for each alternative."""
    dtype: str
    """A safetensors name, or a key of `kinds`."""
    shapes: tuple[tuple[float, ...], ...]
    """Empty where the page tells none."""
    group: str


def cells(section: str) -> Iterator[list[str]]:
    """The rows of a section's table, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def section(title: str) -> str:
    found = re.search(rf"^## [^\n]*{re.escape(title)}[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


@cache
def kinds() -> Mapping[str, Quantizer]:
    return {kind.strip("`"): QUANTIZERS[name.strip("`")] for kind, name, _ in cells(section("How to read"))}


def compute(formula: str, fields: Fields) -> float:
    """The value of a product and sum of fields."""
    plain = re.sub(r"[A-Za-z_][\w.]*", lambda name: repr(fields[name[0]]), formula)

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        assert isinstance(node.value, int | float)
        return node.value

    return value(ast.parse(plain.replace("×", "*").replace("÷", "/"), mode="eval").body)


def alternatives(pattern: str) -> tuple[re.Pattern[str], ...]:
    """Names that a pattern of the page means, its braces spelled out."""
    parts = [part.split(",") for part in re.split("[{}]", pattern)]
    return tuple(as_regex("".join(chosen)) for chosen in itertools.product(*parts))


def as_regex(plain: str) -> re.Pattern[str]:
    anything = {"N": "[0-9]+", "E": "[0-9]+", "…": ".+"}
    return re.compile(r"\.".join(anything.get(segment, segment) for segment in plain.split(".")))


def rows(model: str) -> list[Row]:
    text = section(f"(`{model}`)")
    defined: dict[str, str] = dict(re.findall(r"`([A-Z])` is\s+`([^`]+)`", text))
    layer, letters = defined.pop("L"), {name: compute(formula, FIELDS[model]) for name, formula in defined.items()}
    fields = {**FIELDS[model], **letters}
    found: list[Row] = []
    for tensor, dtype, shape, group in cells(text):
        pattern = re.sub(r"\AL\.", f"{layer}.", tensor.strip("`"))
        shapes = (inner.split(",") for inner in re.findall(r"\[([^\]]+)\]", shape))
        found.append(
            Row(
                pattern=pattern,
                names=alternatives(pattern),
                dtype=dtype.strip("`"),
                shapes=tuple(tuple(compute(part.strip(), fields) for part in parts) for parts in shapes),
                group=group,
            )
        )
    return found


def row_of(name: str, among: list[Row]) -> Row:
    matching = [row for row in among if any(pattern.fullmatch(name) for pattern in row.names)]
    assert len(matching) == 1, f"{name}: {[row.pattern for row in matching]}"
    return matching[0]


def described(tiny: Release) -> Mapping[str, Row]:
    """The page's row of each tensor of an export."""
    among = rows(tiny.name)
    return {name: row_of(name, among) for name in tiny.export}


def published(name: str, dtype: str, tiny: Release) -> Mapping[str, TensorSpec]:
    """The tensors of a weight of an export, by the page's dtype."""
    shape = tuple(tiny.export[name].shape)
    if dtype not in kinds():
        return {name: TensorSpec(name=name, dtype=dtype, shape=shape)}
    rows_, cols = shape
    return kinds()[dtype].parts(name, (rows_, cols))


every_model = pytest.mark.parametrize("model", TABLES)


@every_model
def test_each_tensor_is_in_one_row_and_each_row_is_of_some_tensor(model: str) -> None:
    names = described(release(model)).keys()
    patterns = [pattern for row in rows(model) for pattern in row.names]
    assert not [pattern for pattern in patterns if not any(map(pattern.fullmatch, names))]


@every_model
def test_the_release_is_what_the_rows_say(model: str) -> None:
    tiny, specs = release(model), dict[str, TensorSpec]()
    for name, row in described(tiny).items():
        specs.update(published(name, row.dtype, tiny))
    assert specs == tiny.serving


@every_model
def test_shapes_follow_from_the_config(model: str) -> None:
    tiny = release(model)
    for name, row in described(tiny).items():
        if row.shapes and name not in OTHER_SHAPES:
            assert tuple(tiny.export[name].shape) in row.shapes, name
        assert row.shapes or "…" in row.pattern, name


@every_model
def test_what_loads_together_is_told(model: str) -> None:
    tiny = release(model)
    told = described(tiny)
    weights = {part: name for name, row in told.items() for part in published(name, row.dtype, tiny)}
    for group in groups(tiny.serving):
        members = {weights[part] for part in group.names}
        words = {told[name].group for name in members if "…" not in told[name].pattern}
        assert len(words) <= 1, (group, words)
        assert words != {""} or len(members) == 1, f"{members} load together"
        for word in words - {""}:
            assert re.search(rf"(?:^|\.){re.escape(word).replace('E', '[0-9]+')}\Z", group.key), (group.key, word)


def test_the_kinds_of_quantised_weights_are_told_as_they_are() -> None:
    assert set(kinds().values()) == {found for model in TABLES for found in release(model).quantizers.values()}
    sizes = {"r": 96, "c": 160}
    for kind, _, told in cells(section("How to read")):
        parts = kinds()[kind.strip("`")].parts("X.weight", (96, 160)).values()
        found = re.findall(r"`(X\.\w+)` (\w+) \[([^\]]+)\]", re.sub("[⌈⌉]", "", told))
        shapes = (tuple(math.ceil(compute(part, sizes)) for part in shape.split(", ")) for _, _, shape in found)
        specs = [
            TensorSpec(name=name, dtype=dtype, shape=shape)
            for (name, dtype, _), shape in zip(found, shapes, strict=True)
        ]
        assert specs == list(parts)
