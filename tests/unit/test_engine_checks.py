"""What a model can't be asked for is refused under the field that has it."""

from dataclasses import replace

import pytest

from slackwater.engine.torch.checks import check_request
from slackwater.errors import InvalidInputError
from slackwater.ids import RequestId
from slackwater.rollout.request import CompletionRequest, SamplingSpec

VOCABULARY = 10
FITTING = CompletionRequest(
    request_id=RequestId("r"),
    prompt_ids=(0, 9),
    sampling=SamplingSpec(max_tokens=1, logit_bias=((9, 1.0),)),
    forced_ids=(9,),
)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (replace(FITTING, prompt_ids=(1, VOCABULARY)), "prompt"),
        (replace(FITTING, forced_ids=(-1,)), "forced_token_ids"),
        (replace(FITTING, sampling=SamplingSpec(max_tokens=1, logit_bias=((VOCABULARY, 1.0),))), "logit_bias"),
    ],
    ids=["prompt", "forced", "bias"],
)
def test_a8_11_an_id_that_no_token_has_is_told_with_its_field(request_: CompletionRequest, name: str) -> None:
    check_request(FITTING, window=9, vocab_size=VOCABULARY, routing=None)
    with pytest.raises(InvalidInputError, match=rf"^{name} is out of range: token -?\d+ is outside"):
        check_request(request_, window=9, vocab_size=VOCABULARY, routing=None)
