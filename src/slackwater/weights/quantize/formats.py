"""The quantisers by name: which block, codes, scales and tensor names each release serves its weights in.

A name stands in manifests and never changes its meaning.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.weights.quantize.codes import E2M1, E4M3
from slackwater.weights.quantize.quantizer import Layout, Quantizer, Shape
from slackwater.weights.quantize.scales import E4M3_SCALES, E8M0_SCALES, F32_SCALES, Unit

FP8_F32: Final = Quantizer(
    name="fp8-e4m3-128x128-f32",
    block=(128, 128),
    codes=E4M3,
    scales=F32_SCALES,
    layout=Layout(codes="weight", codes_dtype="F8_E4M3", scales="weight_scale_inv", scales_dtype="F32"),
)
"""GLM 5.2 and 5.3, DeepSeek V3. The scale is what codes are multiplied by, whatever ``inv`` suggests."""

FP8_E8M0: Final = Quantizer(
    name="fp8-e4m3-32x32-e8m0",
    block=(32, 32),
    codes=E4M3,
    scales=E8M0_SCALES,
    layout=Layout(codes="weight", codes_dtype="F8_E4M3", scales="scale", scales_dtype="F8_E8M0"),
)
"""DeepSeek V4.1, all but the routed experts."""

MXFP4_I8: Final = Quantizer(
    name="mxfp4-e2m1-32-e8m0-ceil-i8",
    block=(1, 32),
    codes=E2M1,
    scales=E8M0_SCALES,
    layout=Layout(codes="weight", codes_dtype="I8", scales="scale", scales_dtype="F8_E8M0"),
)
"""DeepSeek V4.1, the routed experts."""

MXFP4: Final = Quantizer(
    name="mxfp4-e2m1-32-e8m0-ceil",
    block=(1, 32),
    codes=E2M1,
    scales=E8M0_SCALES,
    layout=Layout(codes="weight_packed", codes_dtype="U8", scales="weight_scale", scales_dtype="U8"),
)
"""Kimi K3, the routed experts: compressed-tensors' ``mxfp4-pack-quantized``, with the scale rounded up."""

NVFP4: Final = Quantizer(
    name="nvfp4-e2m1-16-e4m3",
    block=(1, 16),
    codes=E2M1,
    scales=E4M3_SCALES,
    layout=Layout(
        codes="weight",
        codes_dtype="U8",
        scales="weight_scale",
        scales_dtype="F8_E4M3",
        unit=Unit(leaf="weight_scale_2", shape=(), inverse=False),
    ),
)
"""NVIDIA's ModelOpt: a weight is code * ``weight_scale`` * ``weight_scale_2``."""

NVFP4_PACKED: Final = Quantizer(
    name="nvfp4-e2m1-16-e4m3-packed",
    block=(1, 16),
    codes=E2M1,
    scales=E4M3_SCALES,
    layout=Layout(
        codes="weight_packed",
        codes_dtype="U8",
        scales="weight_scale",
        scales_dtype="F8_E4M3",
        unit=Unit(leaf="weight_global_scale", shape=(1,), inverse=True),
    ),
)
"""compressed-tensors' ``nvfp4-pack-quantized``: a weight is code * ``weight_scale`` / ``weight_global_scale``."""

QUANTIZERS: Final[Mapping[str, Quantizer]] = MappingProxyType(
    {quantizer.name: quantizer for quantizer in (FP8_F32, FP8_E8M0, MXFP4, MXFP4_I8, NVFP4, NVFP4_PACKED)}
)
"""Every quantiser by its name."""


def find_quantizer(serving: Mapping[str, TensorSpec], weight: str) -> tuple[Quantizer, Shape] | None:
    """The quantiser whose layout a checkpoint holds a weight in, and the weight's shape.

    Args:
        serving: What the checkpoint holds, by name.
        weight: The weight's name before quantising, such as ``model.layers.0.mlp.up_proj.weight``.
    """
    for quantizer in QUANTIZERS.values():
        shape = quantizer.shape_in(serving, weight)
        if shape is not None:
            return quantizer, shape
    return None
