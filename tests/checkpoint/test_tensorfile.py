import struct

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from eke.checkpoint import Checkpointer, Keep
from eke.checkpoint.checks import ManifestError
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import (
    ITEMSIZE,
    MAX_HEADER_BYTES,
    FileWriter,
    Piece,
    Span,
    arrange,
    build_header,
    header_length,
    parse_header,
    write_file,
)
from eke.checkpoint.tensors import as_bytes
from eke.errors import InputError

PIECES = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=10).map("m/".__add__),
    st.tuples(st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 3), max_size=3)),
    max_size=8,
).map(lambda d: arrange(Piece(k, t, tuple(s), (0,) * len(s)) for k, (t, s) in d.items()))


@given(PIECES)
def test_header_round_trip_alignment_and_no_holes(pieces):
    header, starts = build_header(pieces)
    assert len(header) % 4096 == 0
    assert header_length(header[:8], len(header)) == len(header) - 8
    size = len(header) + sum(piece.nbytes for piece in pieces)
    spans = parse_header(header[8:], size)
    assert spans == {
        piece.key: Span(piece.dtype, piece.shape, begin, begin + piece.nbytes)
        for piece, begin in zip(pieces, starts, strict=True)
    }
    assert all(b % ITEMSIZE[p.dtype] == 0 for p, b in zip(pieces, starts, strict=True) if p.nbytes)


@settings(max_examples=25)
@given(PIECES)
def test_the_safetensors_library_reads_what_we_write(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    header, _ = build_header(pieces)
    data = [bytes([i % 2]) * piece.nbytes for i, piece in enumerate(pieces)]
    path.write_bytes(header + b"".join(data))
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(piece.key for piece in pieces)
        for piece, expected in zip(pieces, data, strict=True):
            tensor = file.get_tensor(piece.key)
            assert tuple(tensor.shape) == piece.shape
            assert bytes(as_bytes(tensor)) == expected


def test_safe_open_reads_every_file_of_a_checkpoint(saved):
    run, path = saved
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    for name, tensor in run.model.state_dict().items():
        name = "embed.weight" if name == "head.weight" else name
        assert torch.equal(found[f"model/{name}"], tensor)
    assert {f.name for f in path.glob("*.safetensors")} == {
        "rank00000.state.safetensors",
        "rank00000.frozen.safetensors",
        "rank00000.buffers.safetensors",
        "rank00000.objects.safetensors",
    }


def test_torchs_own_reader_loads_a_checkpoint(saved):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    run, path = saved
    expected = {
        f"model/{k}": v.detach() for k, v in run.model.state_dict().items() if k != "head.weight"
    }
    names = dict(run.model.named_parameters())
    for name, parameter in names.items():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            expected[f"optimizer/{name}/{key}"] = value
    state = {k: torch.empty_like(v) for k, v in expected.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert len(expected) > 15
    assert all(torch.equal(state[k], expected[k]) for k in expected)


def test_torchs_own_reader_puts_shards_of_two_ranks_together(run_ranks, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    script = """
        import torch
        from eke import distributed
        from eke.checkpoint import Checkpointer
        distributed.init()
        torch.manual_seed(0)
        values = torch.nn.ParameterDict({"big": torch.randn(3000, 200), "small": torch.randn(5)})
        ck = Checkpointer(sys.argv[1])
        ck.attach(model=values)
        ck.save(1).wait()
        distributed.shutdown()
    """
    for code, output in run_ranks(2, script, tmp_path / "ck"):
        assert code == 0, output
    path = tmp_path / "ck" / "step-000000001"
    torch.manual_seed(0)
    expected = {"model/big": torch.randn(3000, 200), "model/small": torch.randn(5)}
    state = {k: torch.empty_like(v) for k, v in expected.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(state[k], expected[k]) for k in expected)
    sizes = [f.stat().st_size for f in sorted(path.glob("*.state.safetensors"))]
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)


HEADERS = {
    "not JSON": b"{",
    "not an object": b"[]",
    "key twice": b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "hole": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
    "overlap": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
    b'"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
    "trailing bytes": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    "shape lies": b'{"a":{"dtype":"F32","shape":[9999999],"data_offsets":[0,4]}}',
    "negative": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[-2,0]}}',
    "unknown dtype": b'{"a":{"dtype":"PICKLE","shape":[2],"data_offsets":[0,2]}}',
    "three offsets": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,4]}}',
    "entry is text": b'{"a":"b"}',
    "nested": b'{"a":' * 50_000,
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_refused(name):
    with pytest.raises(ManifestError):
        parse_header(HEADERS[name], 8 + len(HEADERS[name]) + 4)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1, 5000])
def test_a_header_that_states_a_huge_length(length):
    with pytest.raises(ManifestError, match="cannot be"):
        header_length(struct.pack("<Q", length), 4096)


def test_a_file_too_short_for_a_header():
    with pytest.raises(ManifestError, match="too short"):
        header_length(b"\0" * 7, 7)


def test_too_many_tensors_for_one_header(monkeypatch):
    monkeypatch.setattr("eke.checkpoint.tensorfile.MAX_HEADER_BYTES", 5000)
    with pytest.raises(InputError, match="safetensors allows"):
        build_header([Piece(f"m/{i}", "U8", (1,), (0,)) for i in range(100)])


@pytest.mark.parametrize("short", [False, True])
def test_writer_hashes_what_it_writes_also_through_short_writes(tmp_path, faulty, short):
    faulty.short = short
    data = bytes(range(256)) * 50
    writer = FileWriter(faulty, tmp_path / "f")
    writer.write(memoryview(data))
    writer.write(memoryview(b"tail"))
    entry = writer.finish(durable=True)
    writer.close()
    assert (tmp_path / "f").read_bytes() == data + b"tail"
    assert entry.bytes == len(data) + 4
    assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest(data + b"tail")
    assert faulty.calls["sync"] == 1


def test_a_file_is_never_overwritten(tmp_path):
    write_file(Storage(), tmp_path / "f", b"first", durable=False)
    with pytest.raises(FileExistsError):
        write_file(Storage(), tmp_path / "f", b"second", durable=False)
    assert (tmp_path / "f").read_bytes() == b"first"


def test_unusual_dtypes_survive_a_checkpoint(tmp_path):
    torch.manual_seed(1)
    tensors = {
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "fnuz": torch.randn(4).to(torch.float8_e4m3fnuz),
        "c64": torch.randn(2, 3, dtype=torch.complex64).t(),
        "c128": torch.randn(2, dtype=torch.complex128),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "u16": torch.arange(3).to(torch.uint16),
        "strided": torch.randn(6, 6)[::2, 1::2],
    }
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    before = {name: bytes(as_bytes(tensor)) for name, tensor in tensors.items()}
    with Checkpointer(tmp_path, keep=Keep()) as ck:
        ck.attach(model=model)
        path = ck.save(0).wait().path
        for tensor in tensors.values():
            tensor.zero_()
        ck.restore()
    assert {name: bytes(as_bytes(tensor)) for name, tensor in tensors.items()} == before
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:  # what any other tool sees
            plain = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        assert {key: bytes(as_bytes(tensor)) for key, tensor in plain.items()} == {
            f"model/{name}": data for name, data in before.items()
        }
        for name in ("bf16", "fp8", "none", "scalar", "flags", "u16", "strided"):
            found = plain[f"model/{name}"]
            assert (found.dtype, found.shape) == (tensors[name].dtype, tensors[name].shape)
        assert (plain["model/c64"].dtype, plain["model/c64"].shape) == (torch.float32, (3, 2, 2))
        assert plain["model/fnuz"].dtype == torch.uint8
