"""`elmo export`: the exported models against the model and AllenNLP's numbers, the example alone, and mistakes."""

import importlib.util
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from bilm_models import make_tokenizer, seeded, tiny_model
from clean_python import run
from endings import conclusion, printed_by
from errors import refused
from head_models import make_model, stirred
from places import ELMO_FIXTURES

from modeling_elmo import (
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
)
from modeling_elmo.conversion.formats import convert_checkpoint
from modeling_elmo.conversion.original import OriginalCheckpoint
from modeling_elmo.run_scripts import export
from modeling_elmo.run_scripts.export import PACKAGES_OF_ONNX, check_exportable, load_onnx
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

ALLENNLP = ELMO_FIXTURES / "allennlp"
WITH_ONNX = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES_OF_ONNX)), reason="needs onnx, onnxscript and onnxruntime"
)
# What runs the model may not need any of these.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({names}))\n"
ONNX_ALONE = (
    WITHOUT.format(names=["torch", "transformers", "tokenizers", "modeling_elmo"])
    + """
import json, runpy
import numpy, onnxruntime
example = runpy.run_path("onnx_vectors.py")
session = onnxruntime.InferenceSession("model.onnx")
sentences = json.loads(sys.argv[1])
inputs = example["encode"](sentences, 50)
vectors = {str(number): array for number, array in enumerate(example["embed"](session, sentences))}
layers = session.run(["hidden_states"], inputs)[0]
numpy.savez(sys.argv[2], layers=layers, **inputs, **vectors)
"""
)
TORCH_ALONE = (
    WITHOUT.format(names=["transformers", "tokenizers", "modeling_elmo"])
    + """
import torch
model = torch.export.load("model.pt2").module()
inputs, outputs = sys.argv[1:]
torch.save(model(**torch.load(inputs)), outputs)
"""
)


def arguments(folder, output, **options):
    options = {"model": folder, "output_dir": output, **options}
    return [str(item) for name, value in options.items() for item in (f"--{name}", value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """AllenNLP's tiny biLM, with a vocabulary cache of one word, which is not exported."""
    folder = tmp_path_factory.mktemp("model") / "elmo"
    convert_checkpoint(OriginalCheckpoint, ALLENNLP / "lm_weights.hdf5", folder, options=ALLENNLP / "options.json")
    model, tokenizer = ELMoModel.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    model.cache_vocabulary(["play"], tokenizer, save=True)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def onnx_folder(folder):
    return export.main(arguments(folder, folder.with_name("onnx")))


def check_outputs(found, model, inputs, atol):
    with torch.no_grad():
        expected = model(**inputs)
    torch.testing.assert_close(found["elmo_embeddings"], expected.elmo_embeddings, rtol=0, atol=atol)
    torch.testing.assert_close(found["hidden_states"], torch.stack(expected.hidden_states, 1), rtol=0, atol=atol)


@pytest.mark.slow
def test_exported_program_alone(folder, tmp_path, capsys):
    """A process without transformers gives the model's layers and mix, for masks with holes, also for a single row."""
    output = export.main(arguments(folder, tmp_path / "pt2", format="pt2"))
    printed = capsys.readouterr().out
    assert "Largest difference from the model: " in printed
    told, (*_, code) = conclusion(printed)
    assert told.startswith(f"Wrote {output / 'model.pt2'}, ") and "character_ids" in printed_by(code)
    assert not (output / "onnx_vectors.py").exists()
    names = torch.export.load(output / "model.pt2").state_dict
    assert len(names) > 30 and not [name for name in names if "cache" in name]
    model, tokenizer = ELMoModel.from_pretrained(folder).eval(), ELMoTokenizer.from_pretrained(output)
    for number, texts in enumerate((["word"], ["They play chess .", "A longer sentence than the other one ."])):
        inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
        inputs = {name: inputs[name] for name in ("character_ids", "attention_mask")}
        inputs["attention_mask"][:, 1::3] = 0
        torch.save(inputs, tmp_path / f"in{number}")
        run(sys.executable, "-c", TORCH_ALONE, str(tmp_path / f"in{number}"), str(tmp_path / "out"), cwd=output)
        check_outputs(torch.load(tmp_path / "out"), model, inputs, 1e-6)


@WITH_ONNX
@pytest.mark.slow
@pytest.mark.parametrize("rows, words", [(1, 1), (3, 1), (4, 9)])
def test_onnx_at_every_size_and_mask(folder, onnx_folder, rows, words):
    model, run_onnx = ELMoModel.from_pretrained(folder).eval(), load_onnx(onnx_folder / "model.onnx")
    generator = seeded(words)
    mask = torch.rand(rows, words, generator=generator) < 0.6
    mask[0, 0] = True
    characters = torch.randint(1, 262, (rows, words, 50), generator=generator) * mask[..., None]
    inputs = {"character_ids": characters, "attention_mask": mask.long()}
    check_outputs(run_onnx(**inputs), model, inputs, 1e-5)


@WITH_ONNX
@pytest.mark.slow
def test_tags_at_every_size_and_mask(tmp_path):
    """biLSTMs and a CRF with constraints: the same probabilities, and the same best sequence."""
    model = stirred(make_model(ELMoForTokenClassification, elmo_placement="both"))
    generator = seeded()
    batches = []
    for rows, words in ((2, 5), (1, 1), (3, 1), (4, 9)):
        mask = torch.rand(rows, words, generator=generator) < 0.6
        characters = torch.randint(1, 30, (rows, words, 9), generator=generator) * mask[..., None]
        ids = torch.randint(0, 12, (rows, words), generator=generator)
        batches.append({"character_ids": characters, "input_ids": ids, "attention_mask": mask.long()})
    export.write_onnx(export.trace(model, batches[0]), tmp_path / "model.onnx")
    run_onnx = load_onnx(tmp_path / "model.onnx")
    for inputs in batches:
        found = run_onnx(**inputs)
        with torch.no_grad():
            expected = model(**inputs)
        torch.testing.assert_close(found["logits"], expected.logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(found["predictions"], expected.predictions)


@pytest.mark.slow
@WITH_ONNX
def test_example_alone_gives_the_numbers_of_allennlp(folder, onnx_folder, tmp_path):
    """A process without torch, transformers and this package: characters, and vectors of the reference's first batch.

    Later batches of the reference continue from the states of the batch before.
    """
    sentences = [batch[0].split() for batch in json.loads((ALLENNLP / "sentences.json").read_text())]
    run(sys.executable, "-c", ONNX_ALONE, json.dumps(sentences), str(tmp_path / "found.npz"), cwd=onnx_folder)
    printed = run(sys.executable, "onnx_vectors.py", "They play .", "", "눈 \u00e9t\u00e9", cwd=onnx_folder)
    words = [f"{word} (32,)" for word in ("They", "play", ".", "눈", "été")]
    assert [line.split(" [")[0] for line in printed.splitlines()] == words
    found = np.load(tmp_path / "found.npz")
    encoding = ELMoTokenizer.from_pretrained(folder)(
        sentences, is_split_into_words=True, padding=True, return_tensors="np"
    )
    for name in ("character_ids", "attention_mask"):
        np.testing.assert_array_equal(found[name], encoding[name])
    model = ELMoModel.from_pretrained(folder).eval()
    for number, words in enumerate(sentences):
        with h5py.File(ALLENNLP / f"lm_embeddings_{number}.hdf5") as file:
            top = np.concatenate(file["0"][()], axis=-1)
        np.testing.assert_allclose(found["layers"][number, -1, 1 : len(words) + 1], top, rtol=0, atol=1e-5)
        with torch.no_grad():
            inputs = ELMoTokenizer.from_pretrained(folder)([words], is_split_into_words=True, return_tensors="pt")
            mixed = model(**inputs).elmo_embeddings[0, 1:-1]
        np.testing.assert_allclose(found[str(number)], mixed, rtol=0, atol=1e-5)


@pytest.mark.slow
@WITH_ONNX
@pytest.mark.parametrize("plain_signs", [False, True])
def test_example_spells_as_the_tokenizer(onnx_folder, plain_signs):
    example = export.EXAMPLE.read_text("utf-8")
    assert (onnx_folder / export.EXAMPLE.name).read_text("utf-8") == example
    names = {"__name__": "example"}
    exec(example, names)
    sentences = [["<S>", "naïve", "눈", "x" * 60, "é" * 30, "\ud800", ""], ["a"]]
    sentences += [["won’t", "cafe\u0301", "‘‚‛“”„‟‐‑–—―…", "\u1112\u1161\u11ab", "\u2026\ud800"]]
    tokenizer = ELMoTokenizer(max_word_length=20, plain_signs=plain_signs)
    encoding = tokenizer(sentences, is_split_into_words=True, padding=True, return_tensors="np")
    for name, array in names["encode"](sentences, 20, plain_signs).items():
        np.testing.assert_array_equal(array, encoding[name])


def save(folder, model):
    model.save_pretrained(folder)
    make_tokenizer("play").save_pretrained(folder)
    return folder


SMALL = {"num_hidden_layers": 1, "num_labels": 3, "vocab_size": 5, "head": "linear"}


@pytest.mark.slow
@WITH_ONNX
@pytest.mark.parametrize(
    "model_class, options, outputs, has_example",
    [
        (ELMoForPreTraining, {"scalar_mix_layer_norm": "token"}, {"elmo_embeddings", "hidden_states"}, True),
        (ELMoModel, {"word_embedding_size": 4}, {"elmo_embeddings", "hidden_states"}, False),
        (ELMoModel, {"word_embedding_size": 4, "char_vocab_size": 0}, {"elmo_embeddings", "hidden_states"}, False),
        (ELMoForTokenClassification, {}, {"logits"}, True),
        (ELMoForTokenClassification, {"head": "paper"}, {"logits", "predictions"}, True),
        (ELMoForSequenceClassification, {"freeze_bilm": False}, {"logits"}, False),
    ],
)
def test_other_models(tmp_path, capsys, model_class, options, outputs, has_example):
    """Also without clips and projections. The program itself compares them with the model."""
    model = tiny_model(model_class, **{**SMALL, "cell_clip": None, "projection_clip": None, **options})
    folder = save(tmp_path / "model", model.half())
    output = export.main(arguments(folder, tmp_path / "onnx"))
    assert {path.suffix for path in output.iterdir()} >= {".onnx", ".json"}
    assert (output / "onnx_vectors.py").exists() == has_example
    assert (output / "onnx_tags.py").exists() == (model_class is ELMoForTokenClassification)
    told, following = conclusion(capsys.readouterr().out)
    size = (output / "model.onnx").stat().st_size
    assert re.fullmatch(rf"Wrote .*, {size:,} bytes; outputs differ from the model's by up to \S+e-\d+\.", told)
    if has_example:
        assert following[0] == "python" and Path(following[1]).is_file()
    else:
        assert "attention_mask" in printed_by(following[2])
    tokenizer = ELMoTokenizer.from_pretrained(output)
    names = export.input_names(model)
    inputs = {name: tensor for name, tensor in tokenizer("They play", return_tensors="pt").items() if name in names}
    assert load_onnx(output / "model.onnx")(**inputs).keys() == outputs
    assert json.loads((output / "config.json").read_text())["id2label"].keys() == {"0", "1", "2"}


TOKENIZER_ALONE = """
import sys
sys.modules["modeling_elmo"] = None  # as if it were not installed
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)("They play")["input_ids"])
"""
SPELLED = ["They", "PLAY", "won’t", "<S>", "naïve", "x" * 60, "unseen", "<PAD>"]


@pytest.mark.slow
@WITH_ONNX
@pytest.mark.parametrize("head", ["linear", "paper"])
def test_tags_without_this_package(tmp_path, head):
    """The script prints the tags of the model, with word ids by the rules of the tokenizer, which loads in silence."""
    tokenizer = ELMoTokenizer(plain_signs=True, pre_tokenization="whitespace", cut_before_lookup=True)
    tokenizer = tokenizer.with_vocabulary([*SPECIAL_WORDS, "They", "play", "won't", "x" * 48], lowercase_unknown=True)
    names = {number: f"L{number}" for number in range(9)}
    options = {"head": head, "id2label": names, "num_labels": 9, "vocab_size": len(tokenizer), "max_word_length": 50}
    model = stirred(tiny_model(ELMoForTokenClassification, **SMALL | options)).eval()
    sentences = [SPELLED, ["play"]]
    inputs = tokenizer(sentences, is_split_into_words=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        if head == "linear":  # so that words differ in their tags
            model.classifier.bias.sub_(model(**inputs).logits[0].mean(0))
        found = model(**inputs)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    output = export.main(arguments(tmp_path / "model", tmp_path / "onnx"))
    printed = run(sys.executable, "onnx_tags.py", *map(" ".join, sentences), cwd=output)
    best = found.predictions if head == "paper" else found.logits.argmax(-1)
    expected = []
    for words, row in zip(sentences, best.tolist(), strict=True):
        expected += [f"{word}\t{names[label]}" for word, label in zip(words, row[1:], strict=False)]
    assert printed.splitlines() == expected and len({line.split("\t")[1] for line in expected}) > 1
    ids = tokenizer("They play")["input_ids"]
    home = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TOKENIZER_ALONE, str(output)], env=os.environ | home, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (f"{ids}\n", "")


@pytest.mark.slow
@WITH_ONNX
def test_word_ids_of_the_example_of_tags(monkeypatch):
    monkeypatch.syspath_prepend(str(export.EXAMPLE.parent))
    names = runpy.run_path(str(export.EXAMPLE_OF_TAGS), run_name="example")
    words = [*SPECIAL_WORDS, "They", "play", "won't", "x" * 18, "<S>s"]
    for lowercase, cut, plain in itertools.product([False, True], repeat=3):
        tokenizer = ELMoTokenizer(max_word_length=20, plain_signs=plain, cut_before_lookup=cut)
        tokenizer = tokenizer.with_vocabulary(words, lowercase_unknown=lowercase)
        settings = {"plain_signs": plain, "cut_before_lookup": cut, "lowercase_unknown": lowercase}
        vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
        sentences = [SPELLED, ["They"]]
        expected = tokenizer(sentences, is_split_into_words=True, padding=True, return_tensors="np")["input_ids"]
        np.testing.assert_array_equal(names["word_ids"](sentences, 20, vocabulary, settings), expected)


@pytest.mark.parametrize(
    "model_class, options, message",
    [
        (ELMoForQuestionAnswering, {}, "model is ELMoForQuestionAnswering; pass a"),
        (ELMoForSequenceClassification, {"head": "paper"}, "cannot be exported with head='paper'"),
        (ELMoModel, {"scalar_mix_layer_norm": "bilm"}, "scalar_mix_layer_norm='bilm', which is over a whole batch"),
    ],
)
def test_models_that_cannot_be_exported(tmp_path, model_class, options, message):
    folder = save(tmp_path / "model", tiny_model(model_class, **{**SMALL, **options}))
    with refused(message):
        export.main(arguments(folder, tmp_path / "out", format="pt2"))
    assert not (tmp_path / "out").exists()


def test_states_that_cannot_be_exported(monkeypatch):
    for module in ("base", "kernels.int8"):  # on every processor
        monkeypatch.setattr(f"modeling_elmo.{module}.int8_obstacle", lambda: None)
    model = tiny_model(**SMALL).quantize()
    with refused(r"in 8 bits. Export the model in float32, or what"):
        check_exportable(model)


def test_a_wrong_export_is_not_written(folder, tmp_path, monkeypatch):
    model = ELMoModel.from_pretrained(folder).eval()
    model.forward_lstm.layers[1].forget_bias += 0.01
    monkeypatch.setattr(export, "trace", lambda model, inputs: None)
    monkeypatch.setattr(torch.export, "save", lambda program, path: path.write_text("wrong"))
    monkeypatch.setattr(torch.export, "load", lambda path: SimpleNamespace(module=lambda: export.NamedOutputs(model)))
    with refused(r"That is more than 1e-05: .*out is not written"):
        export.main(arguments(folder, tmp_path / "out", format="pt2"))
    assert not any(tmp_path.iterdir())


def test_packages_that_are_missing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("modeling_elmo.run_scripts.program.command_line.find_spec", lambda name: None)
    with refused(r'an ONNX file needs onnx: pip install "modeling-elmo\[export\]"', ImportError):
        export.main(arguments(folder, tmp_path / "out"))
