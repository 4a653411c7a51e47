from __future__ import annotations

import pytest

from eke.batching.plan import DUMMY_TOKENS, BlockPlan, PerStep, Rules, Sample
from eke.errors import InputError

LONG, SHORT = Sample(0, 9, 8), Sample(1, 4, 3)
STEPS = (((LONG, SHORT), (SHORT,)), ((SHORT,), ()))


def test_what_a_padded_plan_occupies() -> None:
    block = BlockPlan(STEPS, Rules(32, PerStep("tokens", 1)))
    assert block.shapes() == [(2, 9), (1, 4), (1, 4), (1, DUMMY_TOKENS)]
    assert block.occupied_tokens() == 18 + 4 + 4 + DUMMY_TOKENS
    assert block.paced_tokens() == 2 * 18 + 2 * 4


def test_what_a_packed_plan_occupies() -> None:
    block = BlockPlan(STEPS, Rules(32, PerStep("tokens", 1), packed=True))
    assert block.shapes() == [(1, 9), (1, 4), (1, 4), (1, 4), (1, DUMMY_TOKENS)]
    assert block.occupied_tokens() == 13 + 4 + 4 + DUMMY_TOKENS
    assert block.paced_tokens() == 2 * 13 + 2 * 4


def test_the_first_step_and_the_rest_are_the_whole() -> None:
    block = BlockPlan(STEPS, Rules(32, PerStep("tokens", 1)))
    first, rest = block.first_step()
    assert first.steps + rest.steps == block.steps
    assert first.indices() == [0, 1, 1]
    assert rest.samples() == [SHORT]


@pytest.mark.parametrize(
    "text", ["", "64", "tokens", "tokens:", "tokens:0", "tokens:-1", "steps:3", "tokens:1.5"]
)
def test_a_per_step_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="per_step"):
        PerStep.parse(text)


def test_per_step_is_read() -> None:
    assert PerStep.parse("tokens:65536") == ("tokens", 65536)
    assert PerStep.parse("samples:64") == ("samples", 64)
