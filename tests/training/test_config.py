"""`run.toml`: every mistake is one clear error, and what is valid survives being written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.errors import InputError
from eke.training.config import Cadence, RunConfig

# ---------------------------------------------------------------------- mistakes

BAD = [
    # toml, then what the error must name: key, value, rule, fix
    ("[modle]\n", ["'modle'", "known here: run, model", "Did you mean 'model'"]),
    ("[literal]\n", ["section 'literal'", "known here: run, model", "Remove it"]),
    ("[model]\nsorce = 'x'\n", ["'model.sorce'", "known here: source", "Did you mean 'source'"]),
    ("[model]\nlr = 0.1\n", ["'model.lr'", "known here: source", "Did you mean 'optimizer.lr'"]),
    ("lr = 0.1\n", ["'lr'", "known here: run, model", "Did you mean 'optimizer.lr'"]),
    ("model = 'builtin:tiny'\n", ["model", "'builtin:tiny'", "it is a section", "Write [model]"]),
    ("[run]\nname = 'a/b'\n", ["run.name", "'a/b'", "pattern", "Correct run.name"]),
    ("[run]\nname = '..'\n", ["run.name", "'..'", "inside run.dir", "Correct run.name"]),
    ("[run]\nseed = -1\n", ["run.seed", "-1", "greater than or equal to 0", "for 0"]),
    ("[run]\nseed = true\n", ["run.seed", "True", "true and false mean nothing", "for 0"]),
    ("[run]\ndevice = 'tpu'\n", ["run.device", "'tpu'", "'auto', 'cpu' or 'cuda'", "for 'auto'"]),
    ("[model]\ntokenizer = 'builtin:tiny'\n", ["model.tokenizer", "a folder or a hub id"]),
    ("[model]\ndtype = 'fp8'\n", ["model.dtype", "'fp8'", "'bf16'", "for 'auto'"]),
    ("[data]\nmax_length = 1\n", ["data.max_length", "got 1", "at least 2 tokens", "for 'auto'"]),
    ("[data]\nmax_length = '1k'\n", ["data.max_length", "'1k'", "integer", "'auto'"]),
    ("[data]\neval_examples = 1\n", ["data.eval_examples", "got 1", "at least 2 examples"]),
    ("[data]\nworkers = -2\n", ["data.workers", "-2", "0 or more"]),
    ("[data]\noverlength = 'cut'\n", ["data.overlength", "'cut'", "'truncate'"]),
    ("[budget]\nmemory = '20 GHz'\n", ["budget.memory", "'20 GHz'", "unit", '"20GiB"']),
    ("[budget]\nwall_time = 'soon'\n", ["budget.wall_time", "'soon'", "unit of time", '"30m"']),
    ("[budget]\nflops = '-1'\n", ["budget.flops", "'-1'", "at least 0", '"2e17"']),
    ("[budget]\nflops = 0\n", ["budget.flops is zero", "more than zero", "leave budget.flops out"]),
    ("[budget]\nflops = inf\n", ["budget.flops", "inf", "finite"]),
    ("[budget]\nepochs = 1.5\n", ["budget.epochs", "1.5", "integer"]),
    ("[budget]\nenergy = '1 horse'\n", ["budget.energy", "'1 horse'", '"1MJ"']),
    ("[budget]\ncost = 5\nprice_per_hour = '2 USD'\n", ["budget.cost", "5", "currency", '"5 USD"']),
    ("[budget]\ncost = '5 USD'\n", ["budget.cost has no price", "'5 USD'", "price_per_hour"]),
    (
        "[budget]\ncost = '5 USD'\nprice_per_hour = '2 EUR'\n",
        ["different currencies", "USD and EUR", "one currency"],
    ),
    ("[batch]\nper_step = 'rows:8'\n", ["batch.per_step", "'rows:8'", '"samples:N"', "for 'auto'"]),
    ("[batch]\nper_step = 64\n", ["batch.per_step", "64", '"tokens:N", "samples:N"']),
    ("[batch]\nper_step = 'samples:0'\n", ["batch.per_step", "'samples:0'", "N at least 1"]),
    ("[batch]\nmicro_tokens = 1\n", ["batch.micro_tokens", "got 1", "at least 2 tokens"]),
    ("[batch]\nwindow = 0\n", ["batch.window", "0", "greater than or equal to 1"]),
    ("[optimizer]\nlr = 0.0\n", ["optimizer.lr", "0.0", "more than 0 and less than 10"]),
    ("[optimizer]\nlr = nan\n", ["optimizer.lr", "nan", "finite"]),
    ("[optimizer]\nbetas = [0.9, 1.0]\n", ["optimizer.betas", "1.0", "less than 1"]),
    ("[batch]\nloss = 'tokens'\n", ["batch.loss", "'tokens'", "'token', 'sample' or 'sequence'"]),
    ("[batch]\nloss = true\n", ["batch.loss", "true and false mean nothing here"]),
    ("[optimizer]\nbetas = [0.9]\n", ["optimizer.betas", "Field required"]),
    ("[optimizer]\nwarmup_steps = -1\n", ["optimizer.warmup_steps", "-1", "0 or more"]),
    ("[governor]\nactions = ['stop']\n", ["governor.actions", "'stop'", "'decay' or 'rollback'"]),
    ("[governor]\neval_every = '2m'\n", ["governor.eval_every", "'2m'", '"50 steps"', "'auto'"]),
    ("[governor]\nreserve = 0.9\n", ["governor.reserve", "0.9", "less than or equal to 0.5"]),
    ("[checkpoint]\nevery = 'often'\n", ["checkpoint.every", "'often'", '"50 steps" or a time']),
    ("[checkpoint]\nevery = '1.5 steps'\n", ["checkpoint.every", "'1.5 steps'", '"50 steps"']),
    ("[checkpoint]\nkeep_every = '2m'\n", ["checkpoint.keep_every", "'2m'", '"50 steps"']),
    ("[checkpoint]\nkeep_every = 'auto'\n", ["checkpoint.keep_every", "'auto'", '"50 steps"']),
    ("[checkpoint]\nmtbf = 'never'\n", ["checkpoint.mtbf", "'never'", "unit of time"]),
    ("[checkpoint]\nmtbf = 0\n", ["checkpoint.mtbf", "between failures"]),
    ("[model]\nsource = builtin\n", ["is not TOML", "line 2", "strings need quotes"]),
]


@pytest.mark.parametrize(("text", "names"), BAD, ids=[text.strip() for text, _ in BAD])
def test_a_mistake_is_one_clear_error(tmp_path: Path, text: str, names: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        RunConfig.load(path)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    for name in names:
        assert name in message


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[run]\nseed = -1\n")
    with pytest.raises(InputError, match=r"mine\.toml: run\.seed"):
        RunConfig.load(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(InputError, match=r"no such configuration file.*none\.toml"):
        RunConfig.load(missing)
    with pytest.raises(InputError, match=r"is a folder.*Give the file in it"):
        RunConfig.load(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"is not TOML"):
        RunConfig.load(binary)
    with pytest.raises(InputError, match=r"cannot be read: Not a directory"):
        RunConfig.load(binary / "run.toml")


# ---------------------------------------------------------------------- overrides and names


def test_an_override_replaces_one_key(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[budget]\nflops = 1e15\nsteps = 5\n")
    config = RunConfig.load(
        path,
        [
            "budget.flops=2e15",
            "budget.wall_time=30m",
            'run.name="x"',
            "optimizer.betas=[0.8, 0.9]",
            "run.deterministic=false",
        ],
    )
    assert (config.budget.flops, config.budget.steps) == (2e15, 5)
    assert config.budget.parse().seconds == 1800
    assert (config.run.name, config.run.deterministic) == ("x", False)
    assert config.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize("bad", ["budget.flops", "flops=1", "a.b.c=1", ".flops=1", "budget.=1", ""])
def test_an_override_that_is_none(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(InputError, match=r"cannot read an override.*section\.key=value.*--set"):
        RunConfig.load(path, [bad])


def test_an_override_is_checked_like_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(InputError, match=r"optimizer\.lr"):
        RunConfig.load(path, ["optimizer.lr=-1"])
    with pytest.raises(InputError, match=r"'budget\.flop'.*'flops'"):
        RunConfig.load(path, ["budget.flop=1e15"])


@pytest.mark.parametrize(
    ("file", "name"),
    [("big.toml", "big"), ("my run (2).toml", "my-run-2"), ("..toml", "run"), ("ü.toml", "run")],
)
def test_an_unnamed_run_is_called_after_its_file(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text("")
    config = RunConfig.load(tmp_path / file)
    assert config.run.name == name
    assert config.run_dir == Path("runs") / name


# ---------------------------------------------------------------------- cadences


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("50 steps", 50, None), ("1 step", 1, None), ("7", 7, None), ("2m", None, 120.0)],
)
def test_a_cadence(text: str, steps: int | None, seconds: float | None) -> None:
    assert Cadence.parse(text) == Cadence(steps=steps, seconds=seconds)


@pytest.mark.parametrize("text", ["0 steps", "0s", "", "steps", "²", "1.5 steps", "-3"])
def test_no_cadence(text: str) -> None:
    with pytest.raises(ValueError, match="a number of steps"):
        Cadence.parse(text)


def test_a_bare_number_is_a_number_of_steps() -> None:
    section = {"every": 50, "keep_every": 100}
    config = RunConfig.from_mapping({"checkpoint": section, "governor": {"eval_every": 5}})
    assert (config.checkpoint.every, config.checkpoint.keep_every) == ("50", "100")
    assert config.governor.eval_every == "5"


# ---------------------------------------------------------------------- round trip

names = st.text("abcXYZ019._-", min_size=1, max_size=8).filter(lambda n: n not in (".", ".."))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
auto = st.just("auto")
cadences = st.integers(1, 10**6).map("{} steps".format)
SECTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "run": {
        "dir": texts,
        "seed": st.integers(0, 2**32 - 1),
        "deterministic": st.booleans(),
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
    },
    "model": {
        "source": texts,
        "tokenizer": texts.filter(lambda t: not t.startswith("builtin:")),
        "dtype": st.sampled_from(["auto", "fp32", "bf16"]),
    },
    "data": {
        "train": texts | st.lists(texts, max_size=3),
        "eval": texts | st.lists(texts, max_size=3),
        "format": st.sampled_from(["auto", "text", "prompt", "chat"]),
        "max_length": auto | st.integers(2, 512),
        "overlength": st.sampled_from(["auto", "error", "truncate", "solo", "skip"]),
        "eval_examples": auto | st.integers(2, 999),
        "workers": auto | st.integers(0, 9),
    },
    "budget": {
        "memory": st.integers(1, 10**12) | st.just("20GiB"),
        "wall_time": st.floats(0.1, 1e9) | st.just("1h30m"),
        "flops": st.floats(1, 1e30) | st.just("2 PFLOP"),
        "tokens": st.integers(1, 10**15) | st.just("10M"),
        "steps": st.integers(1, 10**9) | st.just("10k steps"),
        "epochs": st.integers(1, 100),
        "energy": st.just("0.3 kWh"),
        "price_per_hour": st.sampled_from(["2 USD", "$3.5"]),
    },
    "batch": {
        "per_step": auto | st.sampled_from(["tokens:", "samples:"]).map(lambda k: f"{k}512"),
        "micro_tokens": auto | st.integers(512, 10**6),
        "window": st.integers(1, 10**6),
        "packing": st.booleans(),
        "loss": st.sampled_from(["token", "sample", "sequence"]),
        "order_seed": st.integers(0, 2**32 - 1),
    },
    "optimizer": {
        "lr": auto | st.floats(1e-9, 9.9),
        "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        "eps": st.floats(1e-12, 1e-3),
        "weight_decay": st.floats(0, 10),
        "clip": st.floats(0, 1e6),
        "warmup_steps": auto | st.integers(0, 10**6),
    },
    "governor": {
        "actions": st.lists(st.sampled_from(["decay", "rollback"]), max_size=2),
        "epsilon": st.floats(1e-6, 0.99),
        "min_gain": st.floats(1e-6, 100),
        "patience": st.integers(1, 9),
        "reserve": st.floats(0, 0.5),
        "eval_every": auto | cadences,
        "eval_share": st.floats(1e-3, 0.5),
    },
    "checkpoint": {
        "every": auto | cadences | st.just("2m"),
        "keep_last": st.integers(1, 99),
        "keep_every": cadences,
        "pool": st.just("auto") | st.sampled_from(["1MiB", "64MiB", 2**21]),
        "mtbf": st.just("6h") | st.floats(1, 1e9),
    },
    "log": {"every": st.integers(1, 999)},
}
valid = st.fixed_dictionaries(
    {"run": st.fixed_dictionaries({"name": names}, optional=SECTIONS["run"])},
    optional={
        section: st.fixed_dictionaries({}, optional=keys)
        for section, keys in SECTIONS.items()
        if section != "run"
    },
)


def test_the_strategy_covers_every_key() -> None:
    for section, keys in RunConfig().model_dump().items():
        # A cost needs a price, and a name is always drawn.
        assert SECTIONS[section].keys() | {"cost", "name"} >= keys.keys()


@pytest.fixture(scope="session")
def toml_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "run.toml"


@given(raw=valid)
def test_what_is_written_reads_back_the_same(toml_path: Path, raw: dict[str, Any]) -> None:
    config = RunConfig.from_mapping(raw)
    toml_path.write_text(config.to_toml(), encoding="utf-8")
    again = RunConfig.load(toml_path)
    assert again == config
    assert again.to_toml() == config.to_toml()
    assert config.with_values({}) == config
    assert again.budget.parse() == config.budget.parse()


def test_nothing_heavy_is_imported() -> None:
    heavy = "{'torch', 'numpy', 'transformers'} & {*sys.modules}"
    code = f"import sys, eke.training.config; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"
