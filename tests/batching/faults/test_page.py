"""docs/batching-faults.md and docs/batching-guarantees.md name tests that are there."""

from pathlib import Path

import pytest

PAGE = "batching-faults.md"


@pytest.mark.parametrize("page", [PAGE, "batching-guarantees.md"])
def test_every_test_that_a_page_names_is_there(pages, page):
    pages.check_names(page, at_least=16)


def test_every_fault_has_a_test_or_a_reason(pages):
    pages.check_rows(PAGE, at_least=41)


def test_every_test_of_a_reported_fault_and_its_number_are_on_the_page(pages):
    pages.check_tests(PAGE, Path(__file__).parent, numbers=21)
