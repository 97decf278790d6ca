"""The demo's task: answer in digits. The reward is verifiable and moves within minutes."""

import random
from typing import Final

from slackwater.trainer.samples import Sample

QUESTIONS: Final = (
    "Tell me about numbers.",
    "What is your favourite number?",
    "Count for me.",
    "How old is the Earth?",
    "What year is it?",
    "How far is the Moon?",
    "Give me a phone number.",
    "How many people live in Paris?",
    "What is the speed of light?",
    "When did the war end?",
    "How tall is Mount Everest?",
    "What is the price of gold?",
)
_SYSTEM: Final = "You answer."


def reward(sample: Sample) -> float:
    """Share of digits among the letters and digits of an answer's text, 0 to 1; 0 where there are none."""
    signs = [sign for sign in sample.text if sign.isalnum()]
    return sum(sign.isdigit() for sign in signs) / max(len(signs), 1)


def draw(rng: random.Random, count: int) -> list[list[dict[str, str]]]:
    """``count`` different prompts, as chat messages."""
    return [
        [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
        for question in rng.sample(QUESTIONS, count)
    ]
