"""Only jobs of tests that passed count; and a resume reads no more than its window."""

from benchmarks.batching_claims import LATE, PROCESSES, SIMULATED
from benchmarks.batching_robustness import DRAWN, TESTS, WINDOW, passed, resumed


def test_only_what_passed_counts():
    report = """<testsuites><testsuite>
        <testcase name="test_180_random_runs[2]"/>
        <testcase name="test_180_random_runs[3]"><failure/></testcase>
        <testcase name="test_180_random_runs[4]"><error/></testcase>
        <testcase name="test_20_killed_runs"><skipped/></testcase>
        <testcase name="test_another"/>
    </testsuite></testsuites>"""
    assert passed(report, PROCESSES) == 60
    assert passed(report, SIMULATED) == 0


def test_the_tests_that_it_runs_are_there():
    text = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    assert all(f"def {name}(" in text for tests in DRAWN.values() for name in tests)


def test_a_resume_reads_its_window():
    found = resumed(LATE)
    assert found["read"] == [WINDOW]
    assert found["resume"][0] > 0
