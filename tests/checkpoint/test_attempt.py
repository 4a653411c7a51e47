import pytest
import torch

from eke.checkpoint import Checkpointer, Fit, RngProvider, Storage
from eke.checkpoint.attempt import Attempt
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.providers import ModuleProvider
from eke.checkpoint.reader import Reader
from eke.distributed import World
from eke.errors import EkeError, InputError


@pytest.fixture
def reader(tmp_path):
    model = torch.nn.Linear(2, 3)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, extra={"notes": {"x": 1}})
        path = ck.save(1).wait().path
    with Reader(path, open_manifest(path, Storage()), Storage()) as opened:
        yield opened


def attempt(reader, *, partial=False, cast=False, **providers):
    return Attempt(providers, reader, World(), cast=cast, partial=partial)


def test_comparing_changes_nothing_and_loading_only_what_fits(reader):
    model = torch.nn.ModuleDict({"other": torch.nn.Linear(2, 3)})
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(3, 2)))
    model.register_parameter("bias", torch.nn.Parameter(torch.zeros(4)))
    one = attempt(reader, model=ModuleProvider(model))
    with pytest.raises(InputError, match=r"missing: model/other\.bias.*unexpected: notes.*mism"):
        one.compare(strict=True)
    assert not model.weight.any()
    assert one.untouched == {"model/other.bias", "model/other.weight", "model/bias"}
    one.load()
    assert model.weight.any()
    assert not model.bias.any()


def test_a_provider_sees_what_was_asked_for_and_its_notes_are_told(reader):
    class Asking:
        per_rank = False

        def segments(self):
            return ()

        def state(self):
            return None

        def fit(self, saved):
            assert saved.cast
            half = torch.zeros(3, 2, dtype=torch.float16)
            assert saved.takes("weight", half)
            assert not saved.takes("weight", half.t())
            assert not saved.takes("weight", half.int())
            return Fit(missing=["it"], notes=["it was never there"])

        def load(self, saved):
            raise OSError(5, "Input/output error", "disk")

    one = attempt(reader, partial=True, cast=True, model=Asking())
    with pytest.raises(InputError, match=r"missing: model/it; it was never there"):
        one.compare(strict=True)
    with pytest.raises(EkeError, match=r"restoring 'model'.*disk: Input/output.*partly restored"):
        one.load()


def test_what_belongs_to_ranks_of_another_number_is_left_alone(tmp_path):
    with Checkpointer(tmp_path) as ck:
        ck.attach(rng=True)
        path = ck.save(1).wait().path
    manifest = open_manifest(path, Storage())

    with Reader(path, manifest, Storage()) as opened:
        one = Attempt(
            {"rng": RngProvider()}, opened, World(rank=1, size=2), cast=False, partial=False
        )
        one.compare(strict=True)
    assert one.report["left_alone"] == ["rng (of 1 ranks)"]
    assert one.untouched == {"rng"}
