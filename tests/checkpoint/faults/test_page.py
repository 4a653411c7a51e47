"""docs/checkpoint-faults.md and docs/checkpoint-guarantees.md name tests that are there."""

from pathlib import Path

import pytest

PAGE = "checkpoint-faults.md"


@pytest.mark.parametrize("page", [PAGE, "checkpoint-guarantees.md"])
def test_every_test_that_a_page_names_is_there(pages, page):
    pages.check_names(page, at_least=16)


def test_every_fault_has_a_test_or_a_reason(pages):
    pages.check_rows(PAGE, at_least=46)


def test_every_test_of_a_reported_fault_and_its_number_are_on_the_page(pages):
    pages.check_tests(PAGE, Path(__file__).parent, numbers=16)
