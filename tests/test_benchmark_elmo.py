"""The benchmark on the tiny model: every part runs, and what is wrong gets no figure. Nothing here depends on time."""

import gzip
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modeling_elmo import ELMoConfig, ELMoModel, elmo_lstm
from modeling_elmo.elmo_encoder import ELMoCharacterEncoder
from modeling_elmo.run_scripts import benchmark_elmo
from modeling_elmo.run_scripts.benchmarks import parts as parts
from modeling_elmo.run_scripts.benchmarks import peer_allennlp

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "tests" / "fixtures" / "text" / "en.txt"
SENTENCES = [line.split() for line in TEXT.read_text(encoding="utf-8").splitlines()]
OURS = {"reference", "inference", "floor"}
PEER = """
def peer(model):
    def top_layer(encoding):
        return {factor} * model(**encoding).last_hidden_state

    def tokens(encoding):
        return {token_factor} * model(**encoding).hidden_states[0][..., : model.config.projection_size]

    return {{"model": top_layer, "encoder": tokens, "parameters": dict(model.named_parameters())}}
"""


def benchmark(*arguments: str):
    sizes = ["--preset", "tiny", "--rounds", "2", "--batches", "1x8", "--training_batches", "4x6"]
    benchmark_elmo.main([*sizes, *arguments])


def figures_of(path: Path, *arguments: str) -> dict:
    benchmark("--output", str(path), *arguments)
    return json.loads(path.read_text(encoding="utf-8"))


def implementations(rows: list[dict], part: str, batch: str) -> set[str]:
    return {row["implementation"] for row in rows if (row["part"], row["batch"]) == (part, batch)}


def write_peer(folder: Path, factor: float = 1, token_factor: float = 1) -> str:
    file = folder / "their_elmo.py"
    file.write_text(PEER.format(factor=factor, token_factor=token_factor), encoding="utf-8")
    return f"{file}:peer"


def config_and_encoding(batch: list[list[str]], **overrides):
    return ELMoConfig.from_preset("tiny", **overrides), parts.encode(batch)


def test_every_part_gives_its_rows(tmp_path, capsys):
    batches = ("--batches", "1x8", "3x5dense", "--parts", "inference", "training", "encoder", "lstm", "tokenizer")
    figures = figures_of(tmp_path / "figures.json", *batches)
    rows = figures["rows"]
    for batch in ("1x8", "3x5dense"):
        assert implementations(rows, "inference", batch) == OURS
        assert implementations(rows, "encoder", batch) == OURS | {"vocabulary cache"}
        assert implementations(rows, "lstm", batch) == OURS | {parts.TORCH_LSTM}
    assert implementations(rows, "training", "4x6") == {"reference", "training", "floor"}
    pre_tokenizations = {f"ELMoTokenizer {name}" for name in ("whitespace", "moses", "treebank")}
    assert implementations(rows, "tokenizer", "250 texts") == pre_tokenizations | {"BertTokenizer"}
    assert figures["conditions"]["torch"] == torch.__version__ and figures["conditions"]["text"] == "en.txt"
    printed = capsys.readouterr().out
    assert "### inference, 1x8, 10 tokens, " in printed and "| x torch.nn.LSTM (unclipped) |" in printed


def test_figures_agree_with_each_other(tmp_path):
    rows = figures_of(tmp_path / "figures.json", "--parts", "inference", "tokenizer")["rows"]
    base, ours, floor = (row for row in rows if row["part"] == "inference")
    assert ours["tokens"] == 10 and ours["fastest"] <= ours["milliseconds"] <= ours["slowest"]
    assert ours["tokens_per_second"] == pytest.approx(1e3 * 10 / ours["milliseconds"])
    assert ours["ratios"]["reference"] == pytest.approx(base["milliseconds"] / ours["milliseconds"])
    assert ours["share_of_floor"] == pytest.approx(floor["milliseconds"] / ours["milliseconds"])
    assert 0 <= ours["relative_rms_error"] < 1e-5 and floor["relative_rms_error"] is None
    words = rows[-1]
    assert words["words_per_second"] == pytest.approx(1e3 * words["words"] / words["milliseconds"])


def test_bfloat16_is_compared_with_float32(tmp_path):
    rows = figures_of(tmp_path / "figures.json", "--parts", "inference", "--dtypes", "bfloat16", "float32")["rows"]
    errors = [row["relative_rms_error"] for row in rows if row["implementation"] == "reference"]
    assert 1e-4 < errors[0] < 2e-2 and errors[1] < 1e-6


def test_a_backend_that_is_not_there_for_a_dtype_is_left_out(tmp_path, monkeypatch, capsys):
    def unsuitable(*_):
        raise ValueError("no such instructions")

    monkeypatch.setitem(elmo_lstm.KERNELS, "inference", unsuitable)
    rows = figures_of(tmp_path / "figures.json", "--parts", "inference", "--dtypes", "bfloat16")["rows"]
    assert implementations(rows, "inference", "1x8") == {"reference", "floor"}
    assert "inference bfloat16 is not measured: no such instructions" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no such instructions"):
        benchmark("--parts", "inference")


def test_profile_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    figures = figures_of(
        tmp_path / "figures.json", "--parts", "inference", "tokenizer", "--profile", "--plot", str(picture)
    )
    operators = figures["profiles"]["1x8"]
    assert 1 < len(operators) <= 12 and 0.3 < sum(row["share"] for row in operators) <= 1
    assert "### profile of inference, 1x8" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_needs_a_speed(capsys):
    with pytest.raises(SystemExit):
        benchmark("--parts", "memory", "--plot", "speed.png")
    assert "--plot shows speeds, which memory have not; add inference to --parts" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["inference", "training"])
def test_no_figure_for_a_wrong_lstm(backend, monkeypatch, capsys):
    def doubled(layer, text):
        outputs, *states = elmo_lstm.reference_lstm(layer, text)
        return 2 * outputs, *states

    monkeypatch.setitem(elmo_lstm.KERNELS, backend, doubled)
    with pytest.raises(RuntimeError, match=f"{backend} float32 differs from the reference by .* no figures are given"):
        benchmark("--parts", backend)
    assert "###" not in capsys.readouterr().out


def test_no_figure_for_a_wrong_gradient(monkeypatch):
    def doubled_gradient(layer, text):
        outputs, *states = elmo_lstm.reference_lstm(layer, text)
        return 2 * outputs - outputs.detach(), *states

    monkeypatch.setitem(elmo_lstm.KERNELS, "training", doubled_gradient)
    with pytest.raises(RuntimeError, match="training float32 differs .* in '.*weight'"):
        benchmark("--parts", "training")


def test_no_figure_for_a_wrong_encoder(monkeypatch):
    monkeypatch.setattr(ELMoCharacterEncoder, "_look_up", lambda self, words: 2 * self._convolve(words))
    with pytest.raises(RuntimeError, match="inference float32 differs .* in 'tokens'"):
        benchmark("--parts", "encoder")


def test_no_figure_for_a_wrong_torch_lstm(monkeypatch):
    def of_its_own_weights(layer):
        return torch.nn.LSTM(16, 64, proj_size=16)

    monkeypatch.setattr(parts, "torch_layer", of_its_own_weights)
    with pytest.raises(RuntimeError, match=r"torch.nn.LSTM \(unclipped\) float32 differs"):
        benchmark("--parts", "lstm")


def test_no_figure_for_a_wrong_tokenizer(monkeypatch):
    tokenizer = parts.ELMoTokenizer(pre_tokenization="whitespace")
    parts.check_words(tokenizer, ["one two", f"{'l' * 60} word"])  # the long one is cut
    monkeypatch.setattr(parts, "TextSplitter", lambda _: SimpleNamespace(words=str.upper))
    with pytest.raises(RuntimeError, match="whitespace: 'one two' became .'one', 'two'., not ONE TWO; no figures"):
        parts.check_words(tokenizer, ["one two"])


def test_what_has_no_error():
    one = torch.ones(3)
    assert benchmark_elmo.relative_rms(1.5 * one, one) == pytest.approx(0.5)
    assert benchmark_elmo.relative_rms(0 * one, 0 * one) == 0
    assert benchmark_elmo.relative_rms(math.nan * one, one) == math.inf
    assert benchmark_elmo.relative_rms(torch.ones(2), one) == math.inf


def test_peer_from_a_file(tmp_path):
    rows = figures_of(
        tmp_path / "figures.json", "--parts", "inference", "training", "encoder", "--peer", write_peer(tmp_path)
    )["rows"]
    for part, batch in (("inference", "1x8"), ("training", "4x6"), ("encoder", "1x8")):
        assert "peer" in implementations(rows, part, batch)
        assert all(row["ratios"].keys() == {"reference", "peer"} for row in rows if row["part"] == part)


def test_peer_prepares_outside_the_clock(tmp_path, monkeypatch):
    (tmp_path / "module_of_a_peer.py").write_text(
        "def theirs(model):\n"
        "    prepare = lambda encoding: encoding['character_ids']\n"
        "    return {'prepare': prepare, 'model': lambda ids: model(character_ids=ids).last_hidden_state}\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = figures_of(
        tmp_path / "figures.json", "--parts", "inference", "training", "--peer", "module_of_a_peer:theirs"
    )["rows"]
    assert "theirs" in implementations(rows, "inference", "1x8")
    assert "theirs" not in implementations(rows, "training", "4x6")  # it names no parameters


@pytest.mark.parametrize("part, factors", [("inference", (2, 1)), ("training", (2, 1)), ("encoder", (1, 2))])
def test_no_figure_for_a_wrong_peer(part, factors, tmp_path, capsys):
    with pytest.raises(RuntimeError, match=r"peer float32 differs from the reference by [13].0e\+00 .* no figures"):
        benchmark("--parts", part, "--peer", write_peer(tmp_path, *factors))
    assert "###" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "body, error, message",
    [
        ("return {'encoder': print}", ValueError, r"returned \['encoder'\]; return a dictionary of 'model' and any of"),
        ("return {'model': print, 'modle': print}", ValueError, r"returned \['model', 'modle'\]"),
        ("return print", ValueError, "returned builtin_function_or_method; return a dictionary"),
    ],
)
def test_peer_breaks_the_contract(body, error, message, tmp_path):
    (tmp_path / "their_elmo.py").write_text(f"def peer(model):\n    {body}\n", encoding="utf-8")
    with pytest.raises(error, match=message):
        benchmark("--peer", f"{tmp_path / 'their_elmo.py'}:peer")


@pytest.mark.parametrize(
    "spec, error, message",
    [
        (
            "allennlp",
            ValueError,
            "--peer allennlp is not MODULE:FUNCTION; write for example run_scripts/peer_allennlp.py:",
        ),
        ("json:", ValueError, "--peer json: is not MODULE:FUNCTION"),
        ("json:elmo", ValueError, "--peer json:elmo: json has no function 'elmo'"),
        ("nowhere/peer.py:elmo", FileNotFoundError, "there is no file nowhere/peer.py; pass the path of a Python file"),
        ("no_such_module:elmo", ModuleNotFoundError, "no_such_module"),
    ],
)
def test_bad_peer_names(spec, error, message):
    with pytest.raises(error, match=message):
        benchmark("--peer", spec)


def test_a_peer_without_weights_of_our_names(tmp_path):
    (tmp_path / "their_elmo.py").write_text(
        "def peer(model):\n    return {'model': print, 'parameters': {'w': next(model.parameters())}}\n"
    )
    with pytest.raises(ValueError, match="no parameter has the name and shape of one of ours"):
        benchmark("--peer", f"{tmp_path / 'their_elmo.py'}:peer")


def test_allennlp_reads_words_without_markers():
    encoding = parts.encode([["a", "longer", "one"], ["short"]])
    characters = peer_allennlp.without_markers(encoding)
    assert characters.shape == (2, 3, 50)
    assert torch.equal(characters[0], encoding.character_ids[0, 1:4])
    assert torch.equal(characters[1, :1], encoding.character_ids[1, 1:2]) and not characters[1, 1:].any()


@pytest.mark.skipif(importlib.util.find_spec("allennlp") is None, reason="needs allennlp==2.10.1, without dependencies")
def test_allennlp_agrees(tmp_path):
    peer = f"{ROOT / 'run_scripts' / 'peer_allennlp.py'}:allennlp"
    rows = figures_of(tmp_path / "figures.json", "--parts", "inference", "training", "encoder", "--peer", peer)["rows"]
    assert [row["relative_rms_error"] < 1e-5 for row in rows if row["implementation"] == "allennlp"] == [True] * 3


@pytest.mark.skipif(importlib.util.find_spec("allennlp") is not None, reason="allennlp is there")
def test_allennlp_is_missing():
    with pytest.raises(ImportError, match=r"There is no AllenNLP: pip install --no-deps .* allennlp==2.10.1"):
        peer_allennlp.allennlp(ELMoModel(ELMoConfig.from_preset("tiny")))


@pytest.mark.parametrize("overrides", [{}, {"num_highway_layers": 1, "num_hidden_layers": 3}])
def test_floor_has_the_arithmetic_of_the_model(overrides):
    config, encoding = config_and_encoding(SENTENCES[:6], **overrides)
    tokens = sum(len(words) + 2 for words in SENTENCES[:6])
    distinct = len({"<S>", "</S>"} | {word for words in SENTENCES[:6] for word in words})
    features, outer, inner = config.num_features, config.projection_size, config.lstm_hidden_size
    encoder = distinct * (2 * config.num_highway_layers * features * features + features * outer)
    inputs = (distinct + (config.num_hidden_layers - 1) * tokens) * outer * 4 * inner
    lstm = 2 * (inputs + config.num_hidden_layers * tokens * (outer * 4 * inner + inner * outer))
    flops = {part: sum(each.flops for each in make(config, encoding)) for part, make in parts.PRODUCTS.items()}
    assert flops == {
        "inference": 2 * (encoder + lstm),
        "encoder": 2 * encoder,
        "lstm": 2 * lstm,
        "training": 3 * 2 * (encoder + lstm),
    }


def test_floor_equals_what_torch_counts():
    model = ELMoModel(ELMoConfig.from_preset("tiny"), add_mixing_layer=False)
    encoding = parts.encode([["every", "word", "is", "another"]])  # so that none is encoded twice
    with FlopCounterMode(display=False) as counter:
        parts.inference(model, "reference", encoding)
    counted = {operator.__name__: flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    expected = sum(each.flops for each in parts.all_products(model.config, encoding))
    assert counted["addmm"] + counted["mm"] == expected


def test_floor_runs_its_products(monkeypatch):
    config, encoding = config_and_encoding(SENTENCES[:3])
    products, ran = parts.training_products(config, encoding), []
    monkeypatch.setattr(parts, "packed", lambda weight, keep: weight)
    monkeypatch.setattr(parts, "product", lambda inputs, weight: ran.append((*inputs.shape, len(weight))))
    parts.floor(products, "float32")()
    assert ran == [(each.rows, each.width, each.out) for each in products]


def test_sentences_of_a_batch():
    batch = benchmark_elmo.draw(SENTENCES, "32x20", seed=0)
    assert len(batch) == 32 and len(batch[0]) == 20 and all(3 <= len(words) <= 20 for words in batch)
    assert all(words in SENTENCES for words in batch)
    assert batch == benchmark_elmo.draw(SENTENCES, "32x20", seed=0) != benchmark_elmo.draw(SENTENCES, "32x20", seed=1)
    dense = benchmark_elmo.draw(SENTENCES, "32x20dense", seed=0)
    assert [len(words) for words in dense] == [20] * 32
    cut = benchmark_elmo.draw(SENTENCES, "200x20", seed=0)  # more than there are of up to 20 words
    assert len(cut) == 200 and max(map(len, cut)) == 20


@pytest.mark.parametrize("name", ["20", "0x20", "4x2", "x20", "4x20sparse", "4X20", "4x20x2"])
def test_bad_batch_names(name):
    with pytest.raises(
        ValueError, match=f"'{name}' is no batch: pass ROWSxWORDS or ROWSxWORDSdense with 3 words or more"
    ):
        benchmark("--batches", name)


@pytest.mark.parametrize("name", ["500x12", "4x99", "100x40dense"])
def test_too_few_sentences(name):
    with pytest.raises(ValueError, match=f"too few sentences for a batch of {name}; pass a longer text or smaller"):
        benchmark("--batches", name)
    with pytest.raises(ValueError, match=f"too few sentences for a batch of {name}"):
        benchmark("--training_batches", name)
    benchmark("--batches", name, "--training_batches", name, "--parts", "tokenizer")  # which needs neither


def test_texts(tmp_path, monkeypatch):
    lines = "\n".join(" ".join(words) for words in SENTENCES[:20]) + "\nToo short\n"
    file = tmp_path / "text.txt.gz"
    file.write_bytes(gzip.compress(lines.encode()))
    assert benchmark_elmo.read_sentences(str(file)) == SENTENCES[:20]
    assert benchmark_elmo.read_sentences(None) == SENTENCES
    (tmp_path / "short.txt").write_text("Too short\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"short.txt has no sentence of 3 words or more; pass a text file"):
        benchmark_elmo.read_sentences(str(tmp_path / "short.txt"))
    monkeypatch.setattr(benchmark_elmo, "DEFAULT_TEXT", tmp_path / "not_there.txt")
    with pytest.raises(ValueError, match="Only a clone of the repository has a default text; pass --text_file"):
        benchmark_elmo.read_sentences(None)


def test_bert_has_its_best_case():
    texts = [" ".join(words) for words in SENTENCES]
    tokenizer = parts.bert_tokenizer(texts)
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    assert not (encoded.input_ids == tokenizer.unk_token_id).any()
    pieces = int(encoded.attention_mask.sum()) - 2 * len(texts)
    assert pieces < 1.05 * sum(map(len, SENTENCES))


def test_no_round_is_no_benchmark(capsys):
    with pytest.raises(SystemExit):
        benchmark("--rounds", "0")
    assert "--rounds is 0; pass 1 or more" in capsys.readouterr().err


def test_start_takes_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "IMPORTS", {"little": "import json", "more": "import json, email"})
    rows = figures_of(tmp_path / "figures.json", "--parts", "start")["rows"]
    assert implementations(rows, "start", "import") == {"little", "more"}
    assert implementations(rows, "start", "load") == {
        "Path.read_bytes",
        "from_pretrained",
        "and touching all weights",
    }
    assert rows[-1]["relative_rms_error"] == 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc of Linux")
def test_memory_of_one_batch(tmp_path):
    model = ELMoModel(ELMoConfig.from_preset("tiny"), add_mixing_layer=False)
    model.save_pretrained(tmp_path)
    row = parts.memory_of(tmp_path, "inference", "float32", SENTENCES[:4], torch.get_num_threads())
    assert row["weights_megabytes"] == pytest.approx(4 * model.num_parameters() / 1e6)
    longest = 2 + max(map(len, SENTENCES[:4]))
    assert row["outputs_megabytes"] == pytest.approx(4 * 3 * 4 * longest * 32 / 1e6)
    assert row["rise_megabytes"] >= 0 and row["multiple_at_two_weights"] > 1


@pytest.mark.slow
def test_fresh_processes(tmp_path):
    rows = figures_of(tmp_path / "figures.json", "--parts", "start", "memory", "--rounds", "1")["rows"]
    assert implementations(rows, "start", "import") == set(parts.IMPORTS)
    assert implementations(rows, "memory", "1x8") == {"reference", "inference"}
