"""A transformers module's tensors by the names that its checkpoint has, as views of its memory.

transformers stacks experts and joins projections while it loads. Its own rules say, for every stored name, to which
tensor it goes and by which operations; here they are followed from there back, without a copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import UnsupportedError

_UNDERSTOOD: Final = ((), (MergeModulelist,), (Concatenate,), (MergeModulelist, Concatenate))
"""Operations that have views as their inverse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What one of a module's tensors is made of."""

    groups: Sequence[Sequence[TensorSpec]]
    """Stored tensors in the order in which they lie in memory; a group is what is stacked where anything is."""
    stacked: bool = False
    """Whether a group's tensors lie one after the other in a new first dimension."""
    joined: int | None = None
    """The dimension in which groups follow each other, of the module's tensor; None: there is one group of one."""

    @property
    def stored(self) -> Iterator[TensorSpec]:
        """All tensors that it is made of."""
        return (spec for group in self.groups for spec in group)

    def views(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of the module's tensor, by stored name."""
        begin = 0
        for group in self.groups:
            part = whole
            if self.joined is not None:
                shape = (len(group), *group[0].shape) if self.stacked else group[0].shape
                part = whole.narrow(self.joined, begin, shape[self.joined])
                begin += shape[self.joined]
            parts = part.unbind(0) if self.stacked else (part,)
            yield from ((spec.name, one) for spec, one in zip(group, parts, strict=True))


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a checkpoint holds, themselves: setting ``data`` of one moves it. Tied ones under
    each of their names.
    """
    return module.state_dict(keep_vars=True)


def sources(module: nn.Module, stored: Mapping[str, TensorSpec]) -> dict[str, Source]:
    """What each of a module's tensors is made of, by its name in the module; what goes nowhere is left out.

    Args:
        module: A transformers model, as its class loaded it.
        stored: What its checkpoint holds, by name.

    Raises:
        UnsupportedError: The way from a stored tensor into the module has no view as its inverse.
    """
    model: Any = module
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    live = live_tensors(module)
    found: dict[str, dict[str | None, list[TensorSpec]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, live)
        if target not in live and name in live:
            target, pattern = name, None
        if target in live:
            found.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    return {target: _source(target, groups, by_pattern) for target, groups in found.items()}


def stored_views(module: nn.Module, stored: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """What a checkpoint of a module holds, by stored name, as views of the module's memory: without gradients, and
    valid as long as its tensors stay where they are.

    Args:
        module: As in `sources`.
        stored: Likewise.

    Raises:
        UnsupportedError: As in `sources`, or the module lacks a stored tensor.
    """
    live = live_tensors(module)
    made = sources(module, stored)
    views = {name: view for target, source in made.items() for name, view in source.views(live[target].detach())}
    lacking = sorted(stored.keys() - views.keys())
    if lacking:
        raise UnsupportedError(f"the model has no tensor for {lacking[0]}", hint="publish what the model was made of")
    return views


def _source(
    target: str, groups: Mapping[str | None, list[TensorSpec]], by_pattern: Mapping[str, WeightConverter]
) -> Source:
    pattern = next(iter(groups))
    if pattern is None:
        return Source(groups=list(groups.values()))
    rule = by_pattern[pattern]
    kinds = tuple(type(operation) for operation in rule.operations)
    if kinds not in _UNDERSTOOD or any(isinstance(one, MergeModulelist) and one.dim for one in rule.operations):
        raise UnsupportedError(f"{target}: transformers makes it by {rule.operations}, which can't be patched in place")
    ordered = [groups[source] for source in rule.source_patterns if source in groups]
    stacked = MergeModulelist in kinds
    return Source(
        groups=ordered if stacked else [[spec] for group in ordered for spec in group],
        stacked=stacked,
        joined=next((one.dim for one in rule.operations if isinstance(one, Concatenate)), None),
    )
