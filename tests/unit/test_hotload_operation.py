from itertools import product

import pytest
from hotload_rig import RUN, status

from slackwater.errors import ConflictError
from slackwater.hotload.operation import (
    ENDED,
    MOVES,
    Operation,
    OperationEvent,
    OperationState,
    Order,
    ReplicaProgress,
    ReplicaStage,
    judge,
    outcome,
)
from slackwater.hotload.target import TargetError, TargetStatus
from slackwater.ids import ReplicaId, Version

ORDER = Order(run=RUN, version=Version(7))
BROKEN = TargetError(kind="corrupt", message="broken")
ILLEGAL = [pair for pair in product(OperationState, OperationEvent) if pair not in MOVES]


def operation(state: OperationState) -> Operation:
    return Operation(id="op", idempotency_key="k", order=ORDER, created_at=0.0, state=state)


@pytest.mark.parametrize(("state", "event"), ILLEGAL, ids=str)
def test_an_illegal_event_names_operation_state_and_event(state: OperationState, event: OperationEvent) -> None:
    with pytest.raises(ConflictError, match=rf"operation op: '{event}' is illegal in '{state}'"):
        operation(state).after(event)


def test_an_ended_operation_never_changes() -> None:
    assert not [state for state, _ in MOVES if state in ENDED]
    assert all(operation(state).ended == (state in ENDED) for state in OperationState)


@pytest.mark.parametrize(
    ("seen", "stage"),
    [
        (status(version=7, target=7), ReplicaStage.DONE),
        (status(version=7, target=7, provisional=True, stage="verifying"), ReplicaStage.UNDER_WAY),
        (status(version=6, target=7, stage="preparing"), ReplicaStage.UNDER_WAY),
        (status(version=6, target=7, waiting=True, last_error=BROKEN), ReplicaStage.FAILED),
        (status(version=6, target=7, last_error=BROKEN), ReplicaStage.UNDER_WAY),
        (status(version=6, target=5, waiting=True, last_error=BROKEN), ReplicaStage.UNDER_WAY),
        (status(version=7, target=7, state="retired"), ReplicaStage.FAILED),
        (status(version=6, target=7, state="closed"), ReplicaStage.FAILED),
    ],
)
def test_a_replica_is_judged_by_what_it_says(seen: TargetStatus, stage: ReplicaStage) -> None:
    judged = judge(ORDER, seen)
    assert judged.stage is stage
    assert judged.settled == (stage in (ReplicaStage.DONE, ReplicaStage.FAILED))
    assert (judged.error is not None) == (stage is ReplicaStage.FAILED)


@pytest.mark.parametrize(
    ("stages", "event"),
    [
        ((ReplicaStage.DONE, ReplicaStage.DONE), OperationEvent.ALL_DONE),
        ((ReplicaStage.DONE, ReplicaStage.UNKNOWN), OperationEvent.SOME_DONE),
        ((ReplicaStage.FAILED, ReplicaStage.UNKNOWN), OperationEvent.NONE_DONE),
        ((), OperationEvent.ALL_DONE),
    ],
)
def test_an_operation_ends_by_what_its_replicas_reached(
    stages: tuple[ReplicaStage, ...], event: OperationEvent
) -> None:
    parts = [ReplicaProgress(replica=ReplicaId(str(n)), stage=stage) for n, stage in enumerate(stages)]
    assert outcome(parts) is event
