"""Perplexities against plain loops in float64, for all batches, windows and numbers of processes."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from bilm_models import make_tokenizer, pair_in, save
from datasets import Dataset, DatasetDict
from places import ELMO_FIXTURES
from pretraining_worker import LINES, MODEL, arguments_of, launch
from task_worker import read_json, written
from torch import Tensor

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.conversion.formats import convert_checkpoint
from modeling_elmo.conversion.tensorflow import TensorFlowCheckpoint
from modeling_elmo.run_scripts import perplexity
from modeling_elmo.run_scripts.perplexity import main
from modeling_elmo.run_scripts.pretraining import evaluation
from modeling_elmo.run_scripts.pretraining.batches import StreamWindows, batch_loader
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.pretraining.evaluation import evaluate

TEXT = [*LINES[60:80], "zzz", "unknown words and a very long one : Donaudampfschifffahrtsgesellschaft"]
WORDS = sorted({word for line in LINES[:80] for word in line.split()})[:100]


@pytest.fixture(scope="module", params=["full", "sampled", "adaptive"])
def folder(request, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), softmax_type=request.param)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("full"))


def save_model(folder: Path, **options) -> Path:
    """A model with larger weights than a new one, which gives nearly the same probability to all words."""
    widths = {"max_word_length": MODEL["max_word_length"]}
    tokenizer = make_tokenizer(*WORDS, pre_tokenization="whitespace", **widths)
    torch.manual_seed(0)
    options = {"num_sampled": 20, "dropout": 0.5, "adaptive_cutoffs": [20], **options}
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), **MODEL, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.02 * torch.randn_like(parameter))
    save(folder, model, tokenizer)
    written(folder / "held_out.txt", "\n".join(TEXT) + "\n")
    return folder


def measure(folder: Path, **options) -> evaluation.Perplexity:
    options = {"model": folder, "validation_file": folder / "held_out.txt", "is_split_into_words": True, **options}
    return main(arguments_of(options))


def nearly(found: evaluation.Perplexity) -> dict:
    """All fields, with a relative tolerance of a millionth."""
    return {
        name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        for name, value in vars(found).items()
    }


class Plain:
    """Word by word, with states passed on by hand and `cross_entropy` in float64."""

    def __init__(self, folder: Path):
        self.model = ELMoForPreTraining.from_pretrained(folder).double().eval()
        self.tokenizer = ELMoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def sentence(self, line: str) -> tuple[float, float, int, int]:
        """Losses of both directions, the number of predictions in one, and the number of unknown words."""
        inputs = self.tokenizer([line.split()], is_split_into_words=True, return_tensors="pt")
        layers = self.model.elmo(**inputs).last_hidden_state[0]
        forward, backward = layers.chunk(2, dim=-1)
        ids = inputs["input_ids"][0]
        losses = self.losses(forward[:-1], ids[1:]).sum(), self.losses(backward[1:], ids[:-1]).sum()
        return float(losses[0]), float(losses[1]), len(ids) - 1, int((ids == 3).sum())

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        softmax = self.model.softmax
        if softmax.adaptive is not None:
            return -softmax.adaptive.log_prob(hidden).gather(1, targets[:, None] - 1)[:, 0]
        logits = (hidden @ softmax.weight.T + softmax.bias)[:, 1:]  # <PAD> is not a class
        return F.cross_entropy(logits, targets - 1, reduction="none")

    @torch.no_grad()
    def piece(self, lines: list[str], direction: int) -> float:
        """The loss of a text whose states are never reset."""
        ids, targets, characters = [], [], []
        for line in lines:
            inputs = self.tokenizer([line.split()], is_split_into_words=True, return_tensors="pt")
            order = slice(None) if direction == 0 else torch.arange(inputs["input_ids"].shape[1]).flip(0)
            sentence = inputs["input_ids"][0][order]
            ids, targets = [*ids, *sentence[:-1].tolist()], [*targets, *sentence[1:].tolist()]
            characters.append(inputs["character_ids"][0][order][:-1])
        texts, total, states = {"input_ids": torch.tensor(ids), "character_ids": torch.cat(characters)}, 0.0, None
        for position, target in enumerate(targets):
            word = {name: text[None, position : position + 1] for name, text in texts.items()}
            output = self.model.elmo(**word, initial_states=states)
            states = output.final_states  # after one word, for both directions
            hidden = output.last_hidden_state[0].chunk(2, dim=-1)[direction]
            total += float(self.losses(hidden, torch.tensor([target])))
        return total


def check(found: evaluation.Perplexity, forward: float, backward: float, predictions: int):
    assert found.predictions == predictions
    assert found.forward == pytest.approx(math.exp(forward / predictions), rel=1e-5)
    assert found.backward == pytest.approx(math.exp(backward / predictions), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp((forward + backward) / 2 / predictions), rel=1e-5)
    assert abs(found.forward - found.backward) > 1e-2  # else the test could not tell them apart


def test_sentences(folder, capsys):
    found = measure(folder)
    plain = Plain(folder)
    forward, backward, predictions, unknown = map(sum, zip(*map(plain.sentence, TEXT), strict=True))
    check(found, forward, backward, predictions)
    words = sum(len(line.split()) for line in TEXT)
    assert predictions == words + len(TEXT)
    assert found.unknown_rate == unknown / predictions > 0.1
    assert found.vocabulary_size == len(WORDS) + 4
    assert found.protocol == "each sentence on its own from a zero state"
    printed = capsys.readouterr()
    assert f"{found.perplexity:.2f}" in printed.out and f"{predictions:,} predictions" in printed.out
    assert f"hesitates between {found.perplexity:,.1f} equally likely words of {len(WORDS) + 4:,}" in printed.out
    assert "reading: " in printed.err and " batches" in printed.err  # the progress


def test_the_size_of_batches_does_not_matter(full):
    """Also if sentences are longer than a batch."""
    assert vars(measure(full, per_device_eval_batch_tokens=3)) == nearly(measure(full))


@pytest.mark.parametrize("rows", [1, 3])
def test_streams(rows, folder):
    found = measure(folder, context="stream", per_device_eval_batch_size=rows)
    plain, pieces = Plain(folder), pieces_of(TEXT, rows)
    forward, backward = (sum(plain.piece(piece, direction) for piece in pieces) for direction in (0, 1))
    check(found, forward, backward, sum(len(line.split()) + 1 for line in TEXT))
    pieces = {1: "one piece", 3: "3 pieces of the text side by side"}[rows]
    assert found.protocol == f"states carried from sentence to sentence, both directions in file order, in {pieces}"


@pytest.mark.parametrize("kind", ["characters", "words"])
def test_streams_give_the_figure_of_the_original(kind, tmp_path):
    """bilm-tf's `test()`, on a model that bilm-tf has trained; each direction against a plain loop."""
    original, folder = ELMO_FIXTURES / "bilm_tf_checkpoint" / kind, tmp_path / "model"
    convert_checkpoint(TensorFlowCheckpoint, original, folder)
    found = measure(folder, validation_file=original / "text.txt", context="stream", per_device_eval_batch_size=1)
    expected = read_json(original / "expected.json")
    for name in expected.keys() & {"perplexity", "forward", "backward"}:
        assert getattr(found, name) == pytest.approx(expected[name], rel=1e-6), name
    lines = (original / "text.txt").read_text("utf-8").splitlines()
    plain = Plain(folder)
    check(found, *(plain.piece(lines, direction) for direction in (0, 1)), 139)


def pieces_of(lines: list[str], rows: int) -> list[list[str]]:
    """Pieces of similar length. The first word of a sentence decides its piece."""
    total, before, pieces = sum(len(line.split()) for line in lines), 0, [[] for _ in range(rows)]
    for line in lines:
        pieces[min(before * rows // total, rows - 1)].append(line)
        before += len(line.split())
    assert all(pieces)
    return pieces


@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_the_length_of_windows_does_not_matter(steps, full):
    corpus = Corpus.from_files([str(full / "held_out.txt")])
    model, tokenizer = pair_in(full, ELMoForPreTraining)
    options = {"is_split_into_words": True, "shuffle": False, "repeat": False, "survey": corpus.survey()}
    windows = StreamWindows(corpus, tokenizer, 2, steps, **options)
    found = evaluate(model, batch_loader(windows, num_workers=0), Accelerator(cpu=True))
    assert vars(found) == nearly(measure(full, context="stream", per_device_eval_batch_size=2))


def test_evaluation_leaves_the_model_and_its_dropout_as_they_were(full):
    model, tokenizer = ELMoForPreTraining.from_pretrained(full).train(), ELMoTokenizer.from_pretrained(full)
    corpus = Corpus.from_files([str(full / "held_out.txt")])
    batches = evaluation.held_out_batches(corpus, True, "sentence", 100, tokenizer, Accelerator(cpu=True))
    assert vars(evaluate(model, batches, Accelerator(cpu=True))) == nearly(measure(full))
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_raw_text_and_a_file_of_the_figures(full, tmp_path):
    """This tokenizer splits raw text by white space, so the figures do not change."""
    output = tmp_path / "figures.json"
    found = main(["--model", str(full), "--validation_file", str(full / "held_out.txt"), "--output", str(output)])
    assert read_json(output) == vars(found) == nearly(measure(full))


OF_DATA = {"validation_file": None, "validation_split": "test"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_file": "empty.txt"}, "no sentence in empty.txt"),
        ({"validation_split": "test"}, "--validation_file FILE .*, or --dataset NAME"),
        ({"dataset": "data"}, "--validation_file and --dataset"),
        ({"per_device_eval_batch_size": 2}, "--per_device_eval_batch_size 2 .*: pass --per_device_eval_batch_tokens"),
        ({"context": "stream", "per_device_eval_batch_tokens": 9}, "--per_device_eval_batch_tokens 9"),
        ({"streaming": True}, "--streaming .* without --dataset"),
        ({"output": "."}, r"--output \. is a folder"),
        (OF_DATA | {"dataset": "splits"}, r"--validation_split test: .*'dev'"),
        (OF_DATA | {"dataset": "files"}, r"--dataset files, --validation_split test: Unknown .*\['train'\]"),
    ],
)
def test_mistakes(full, tmp_path, monkeypatch, options, message):
    """Mistakes in options are found before the text is read."""
    monkeypatch.chdir(tmp_path)
    if options.get("validation_file") != "empty.txt":
        monkeypatch.setattr(perplexity, "evaluate", lambda *_: pytest.fail("the text was read"))
    Path("empty.txt").write_text("\n \n", "utf-8")
    data = Dataset.from_dict({"text": TEXT})
    data.save_to_disk("data")
    data.to_json("files/train.jsonl")
    DatasetDict({"dev": data}).save_to_disk("splits")
    with pytest.raises((ValueError, OSError), match=message):
        measure(full, **options)


@pytest.mark.slow
def test_two_processes_equal_one(full, tmp_path):
    """With two processes there are twice as many rows, each with its piece of the text."""
    common = {"model": full, "validation_file": full / "held_out.txt", "is_split_into_words": True}
    contexts = [{"per_device_eval_batch_tokens": 30}, {"context": "stream", "per_device_eval_batch_size": 2}]
    printed = launch(tmp_path, "perplexity", [common | context for context in contexts])
    one = [measure(full), measure(full, context="stream", per_device_eval_batch_size=4)]
    for number, expected in enumerate(one):
        assert read_json(tmp_path / f"{number}.json") == nearly(expected)
    assert printed.count("perplexity") == 2  # one process prints
