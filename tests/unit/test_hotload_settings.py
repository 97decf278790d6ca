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
