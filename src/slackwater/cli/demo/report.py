"""The demo's report: one PNG with the reward, the versions, the deltas and the pauses."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

from slackwater.cli.demo.claims import Record, claims

mpl.use("Agg")


def write_report(record: Record, path: Path) -> None:
    """Draw the run; the file appears whole."""
    from matplotlib import pyplot as plt  # noqa: PLC0415 - the backend must be chosen first

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    _reward(axes[0, 0], record)
    _versions(axes[0, 1], record)
    _deltas(axes[1, 0], record)
    _pauses(axes[1, 1], record)
    for axis in axes.flat:
        axis.xaxis.get_major_locator().set_params(integer=True)
    shown = claims(record)
    figure.suptitle(
        f"slackwater demo · reward gain {shown['reward_gain']:+.2f} · {shown['versions_served']:.0f} versions served · "
        f"{shown['mislabelled_tokens']:.0f} of {shown['tokens_checked']:.0f} tokens mislabelled · "
        f"{shown['wall_s']:.0f} s"
    )
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110)
    plt.close(figure)
    partial.replace(path)


def _reward(axis: Any, record: Record) -> None:
    axis.plot([step.step for step in record.steps], [step.reward for step in record.steps], "o-", color="#1a7f5a")
    axis.set(title="Reward", xlabel="step", ylabel="mean of a step", ylim=(-0.03, 1.05))
    axis.grid(alpha=0.3)


def _versions(axis: Any, record: Record) -> None:
    tokens: dict[str, dict[int, int]] = {}
    for answer in record.answers:
        served = tokens.setdefault(answer.replica, {})
        for version, start, end in answer.policy:
            served[version] = served.get(version, 0) + end - start
    for index, (replica, served) in enumerate(sorted(tokens.items())):
        axis.bar([version + 0.4 * (index - 0.5) for version in served], list(served.values()), 0.4, label=replica)
    axis.set(title="Tokens by policy version", xlabel="version", ylabel="tokens")
    axis.legend()


def _deltas(axis: Any, record: Record) -> None:
    deltas = [item for item in record.published if item.kind == "delta"]
    axis.bar([item.version for item in deltas], [item.uploaded_bytes / 1e6 for item in deltas], color="#4464ad")
    axis.set(title="Delta", xlabel="version", ylabel="MB uploaded")
    density = axis.twinx()
    density.plot(
        [item.version for item in deltas],
        [100 * item.changed / max(item.total, 1) for item in deltas],
        "o-",
        color="#c44",
    )
    density.set_ylabel("% of elements changed", color="#c44")


def _pauses(axis: Any, record: Record) -> None:
    for index, replica in enumerate(sorted({swap.replica for swap in record.swaps})):
        mine = [swap for swap in record.swaps if swap.replica == replica]
        axis.plot([s.version for s in mine], [s.prepare_s * 1e3 for s in mine], "--", color=f"C{index}", alpha=0.5)
        axis.plot([s.version for s in mine], [s.pause_s * 1e3 for s in mine], "o-", color=f"C{index}", label=replica)
    axis.set(
        title="Pause (solid) and preparation while serving (dashed)",
        xlabel="version",
        ylabel="ms",
        yscale="log",
    )
    axis.legend()
