"""What a demo claims of masks and routes, where its trainer asked for them: pure functions over its record."""

from collections.abc import Iterator, Sequence

from slackwater.trainer.align import LabelCheck
from slackwater.trainer.record import AnswerRecord


def evidence_claims(answers: Sequence[AnswerRecord], labels: LabelCheck) -> dict[str, float]:
    """Further figures by name, in the order in which they are printed."""
    masks = list(_masks(answers))
    return {
        "tokens_without_mask": sum(not mask for _, mask in masks),
        "tokens_outside_mask": sum(token not in mask for token, mask in masks if mask),
        "mean_mask_ids": sum(len(mask) for _, mask in masks) / max(len(masks), 1),
        "routes_rows_missing": sum(answer.rows - len(answer.routes) for answer in answers),
        "masks_replayed": labels.masks,
        "masks_replayed_equal": int(labels.masks > labels.masks_differing == 0),
        "routes_rows_replayed": labels.routes,
        "routes_replayed_equal": int(labels.routes > labels.routes_differing == 0),
    }


def evidence_failures(figures: dict[str, float]) -> list[str]:
    """As `slackwater.cli.demo.claims.failures`, of these figures."""
    checks = (
        (figures["tokens_without_mask"] == 0, "tokens came without the ids that they were drawn from"),
        (figures["tokens_outside_mask"] == 0, "tokens are not among the ids that they were drawn from"),
        (figures["routes_rows_missing"] == 0, "routes of positions are missing"),
        (figures["masks_replayed_equal"] == 1, "masks differ from those that the claimed version makes"),
        (figures["routes_replayed_equal"] == 1, "routes differ from those that the claimed version takes"),
    )
    return [sentence for holds, sentence in checks if not holds]


def _masks(answers: Sequence[AnswerRecord]) -> Iterator[tuple[int, Sequence[int]]]:
    for answer in answers:
        for index, token in enumerate(answer.token_ids):
            yield token, answer.masks[index] if index < len(answer.masks) else ()
