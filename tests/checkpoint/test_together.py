import pytest

from eke.checkpoint.errors import CorruptCheckpoint, Problem
from eke.checkpoint.together import agree
from eke.errors import EkeError, InputError


def test_alone():
    assert agree("counting", lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        agree("dividing", lambda: 1 / 0)
    with pytest.raises(EkeError, match=r"reading failed: /x: Input/output error.*disk is failing"):
        agree("reading", lambda: (_ for _ in ()).throw(OSError(5, "Input/output error", "/x")))


def test_one_ranks_error_is_every_ranks_error(run_ranks):
    script = """
        from eke import distributed
        from eke.checkpoint.errors import CorruptCheckpoint, Problem
        from eke.checkpoint.together import agree
        from eke.errors import EkeError, InputError
        world = distributed.init()
        print(agree("counting", lambda: world.rank))

        def fail(error):
            if world.rank == 1:
                raise error
            return "fine"

        for error in (
            InputError("bad thing"),
            OSError(28, "No space left on device", "/disk/f"),
            CorruptCheckpoint("/ck", [Problem("f", "t", "corrupt", "flipped")]),
            ZeroDivisionError("oh"),
        ):
            try:
                agree("saving step 5", lambda: fail(error))
                print("no error")
            except (EkeError, ZeroDivisionError) as caught:
                print(type(caught).__name__, caught)
        print(agree("counting", lambda: world.rank + 10))
        distributed.shutdown()
    """
    outputs = run_ranks(2, script)
    for code, output in outputs:
        assert code == 0, output
    zero, one = (text.splitlines() for _, text in outputs)
    assert zero[0] == one[0] == "[0, 1]"
    assert zero[1].startswith("InputError saving step 5 failed on rank 1: bad thing")
    assert one[1].startswith("InputError bad thing")
    for line in (zero[2], one[2]):
        assert line.startswith("EkeError")
        assert "/disk/f: No space left on device" in line
        assert "Free space there" in line
    assert zero[3] == one[3]
    assert zero[3].startswith(
        "CorruptCheckpoint the checkpoint /ck is corrupt: f, tensor t: flipped"
    )
    assert zero[4].startswith("EkeError saving step 5 failed on rank 1: ZeroDivisionError: oh")
    assert one[4] == "ZeroDivisionError oh"
    assert zero[5] == one[5] == "[10, 11]"


def test_the_worst_kind_stands_for_all():
    problems = [Problem("a", None, "foreign", "x"), Problem("b", "t", "incomplete", "y")]
    error = CorruptCheckpoint("/ck", problems)
    assert "is incomplete: a: x (and 1 more problems)" in str(error)
    assert not isinstance(error, InputError)
    assert error.exit_code == 1
