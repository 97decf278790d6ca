import pytest

from slackwater.config.process import parse_groups
from slackwater.errors import InvalidInputError
from slackwater.ids import RunId

RUN = RunId("demo")


def test_groups_are_read_from_words() -> None:
    follow, manual, pinned = parse_groups(["train=follow:r0,r1", "spare=manual:r2", "eval=pinned:demo/12:r3"], RUN)
    assert (follow.name, follow.mode, follow.version, follow.replicas) == ("train", "follow", None, ("r0", "r1"))
    assert (manual.name, manual.mode, manual.replicas) == ("spare", "manual", ("r2",))
    assert (pinned.mode, pinned.version, pinned.replicas) == ("pinned", 12, ("r3",))


@pytest.mark.parametrize(
    "word",
    [
        "",
        "train",
        "train=",
        "train=follow",
        "train=follow:",
        "train=follow:r0,",
        "train=frozen:r0",
        "=follow:r0",
        "../x=follow:r0",
        "eval=pinned:r0",
        "eval=pinned:demo:r0",
        "eval=pinned:other/1:r0",
        "eval=follow:demo/1:r0",
    ],
)
def test_a_word_that_names_no_group_is_refused(word: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_groups([word], RUN)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train=folow:r0", "group 'train': there is no mode 'folow' (the modes are follow, manual and pinned)"),
        ("train=r0", "group 'train': there is no mode 'r0' (the modes are follow, manual and pinned)"),
        ("e=pinned:r1", "group 'e' is pinned, and its snapshot is missing (write e=pinned:demo/12:r1)"),
        ("e=pinned:demo/3", "group 'e' names no replicas"),
        ("e=follow", "group 'e' names no replicas"),
        ("e=follow:demo/1:r0", "group 'e' has more parts than the mode follow takes"),
        ("e=follow:r0,", "'' can't name a replica of group 'e'"),
        ("a b=follow:r0", "'a b' can't name a group"),
        ("e=pinned:other/1:r0", "pins a snapshot of another run, 'other/1' (this fleet serves 'demo')"),
        ("e:follow:r0", "'e:follow:r0' names no group (write train=follow:r0,r1"),
    ],
)
def test_a_group_that_cannot_be_is_told_what_is_wrong_with_it(word: str, told: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse_groups([word], RUN)
    assert told in str(refused.value)
