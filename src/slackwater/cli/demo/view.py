"""The demo's terminal: what the trainer and both replicas do, drawn anew several times a second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slackwater.cli.demo.claims import SwapRecord
from slackwater.cli.demo.events import PublishedEvent, StepEvent

_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaView:
    """One replica as its last status showed it."""

    name: str
    state: str
    version: int | None
    target: int | None
    in_flight: int
    swaps: tuple[SwapRecord, ...] = ()


@dataclass(kw_only=True, slots=True)
class Progress:
    """What is known of the run so far; the driver fills it, the view reads it."""

    phase: str
    num_steps: int
    steps: list[StepEvent] = field(default_factory=list[StepEvent])
    published: list[PublishedEvent] = field(default_factory=list[PublishedEvent])
    replicas: dict[str, ReplicaView] = field(default_factory=dict[str, ReplicaView])
    restarts: int = 0


def sparkline(values: Sequence[float]) -> str:
    """Values from 0 to 1 as one sign each."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(min(max(value, 0.0), 1.0) * top)] for value in values)


def draw(progress: Progress, elapsed_s: float) -> RenderableType:
    """The whole view."""
    parts: list[RenderableType] = [
        Text.assemble((f"{elapsed_s:5.0f} s  ", "dim"), (progress.phase, "bold")),
        _trainer(progress.steps, progress.num_steps),
        _replicas(progress.replicas),
    ]
    if progress.published:
        parts.append(_published(progress.published[-1]))
    if progress.steps:
        parts.append(Text(f"last answer  {progress.steps[-1].example[:90]!r}", style="italic"))
    return Panel(Group(*parts), title="slackwater demo", border_style="cyan")


def plain(step: StepEvent, progress: Progress) -> str:
    """One step as one line, for output that is no terminal."""
    held = " ".join(f"{view.name}=v{view.version}" for view in progress.replicas.values())
    delta = progress.published[-1].uploaded_bytes / 1e6 if progress.published else 0.0
    return (
        f"step {step.step:3d}  reward {step.reward:.3f}  kl {_kl(step)}  delta {delta:.1f} MB  "
        f"rollout {step.rollout_s:.1f} s  update {step.update_s:.1f} s  publish {step.publish_s:.1f} s  {held}"
    )


def _kl(step: StepEvent) -> str:
    return f"{step.mismatch_kl:.4f}" if step.num_tokens else "–"


def _trainer(steps: Sequence[StepEvent], total: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    rewards = [step.reward for step in steps]
    last = f"{rewards[-1]:.3f}" if rewards else "–"
    table.add_row(
        "reward",
        Text(sparkline(rewards).ljust(total, "·"), style="green"),
        last,
        f"step {len(steps)}/{total}",
    )
    if steps:
        step = steps[-1]
        table.add_row(
            "mismatch",
            f"KL(fleet‖trainer) {_kl(step)}",
            f"{step.num_tokens} tokens",
            f"rollout {step.rollout_s:.1f} s · update {step.update_s:.1f} s · publish {step.publish_s:.1f} s",
        )
    return table


def _replicas(replicas: Mapping[str, ReplicaView]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("replica", "state", "serves", "target", "in flight", "prepare", "pause", "swaps"):
        table.add_column(column, justify="left" if column in ("replica", "state") else "right")
    for view in replicas.values():
        last = view.swaps[-1] if view.swaps else None
        table.add_row(
            view.name,
            view.state,
            "–" if view.version is None else f"v{view.version}",
            "–" if view.target is None else f"v{view.target}",
            str(view.in_flight),
            f"{last.prepare_s * 1e3:.0f} ms" if last else "–",
            f"{last.pause_s * 1e3:.1f} ms" if last else "–",
            str(len(view.swaps)),
        )
    return table


def _published(item: PublishedEvent) -> Text:
    return Text(
        f"v{item.version} {item.kind}: {item.uploaded_bytes / 1e6:.1f} MB of {item.full_bytes / 1e6:.0f} MB "
        f"({item.full_bytes / max(item.uploaded_bytes, 1):.1f}×), "
        f"{item.changed / max(item.total, 1):.2%} of elements changed"
    )
