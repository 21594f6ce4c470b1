"""Workers of `datasets` and of Ray add the vectors that the model has for each row."""

import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from errors import refused
from places import ROOT
from task_worker import bilm

from modeling_elmo import ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts.vectors.embedder import Embedder

TEXTS = ["They didn't play chess.", "", "one", "밥 말이 😀", "one two three four five six seven"] * 3
TOLERANCE = 2e-6
# Without one thread in the workers they wait forever: the threads of the parent are not copied by `fork`.
BUSY_PARENT = """
import sys
import torch
from datasets import Dataset
from modeling_elmo.run_scripts.vectors.embedder import Embedder
torch.set_num_threads(2)
print(float((torch.ones(2000, 2000) @ torch.ones(2000, 2000)).tanh().sum()))
data = Dataset.from_dict({"text": ["a few words"] * 200})
print(data.map(Embedder(sys.argv[1]), batched=True, num_proc=2, batch_size=100).num_rows)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return bilm(tmp_path_factory.mktemp("models") / "elmo-tiny", pre_tokenization="moses")


@torch.no_grad()
def layers_of(model_dir, words):
    """The reference: the model called on one row. Shape: `(layers, tokens, dim)`."""
    model, tokenizer = ELMoModel.from_pretrained(model_dir).eval(), ELMoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer([words], is_split_into_words=not isinstance(words, str), return_tensors="pt")
    return torch.stack(model(**inputs).hidden_states)[:, 0, 1:-1].numpy()


def assert_vectors(rows, model_dir, layers):
    for row in rows:
        expected = layers_of(model_dir, row["text"])
        expected = expected if layers == "all" else expected.mean(0)
        found = np.asarray(row["vectors"], np.float32)
        assert len(row["tokens"]) == expected.shape[-2]
        if expected.size:
            assert found.shape == expected.shape and np.abs(found - expected).max() <= TOLERANCE
        else:
            assert found.size == 0


@pytest.mark.parametrize("layers", ["average", "all"])
def test_two_processes_of_datasets(model_dir, layers):
    data = datasets.Dataset.from_dict({"text": TEXTS, "id": range(len(TEXTS))})
    found = data.map(Embedder(str(model_dir), layers=layers), batched=True, num_proc=2, batch_size=4)
    assert found["id"][:] == data["id"][:] and found["tokens"][0] == ["They", "didn", "'t", "play", "chess", "."]
    inner = found.features["vectors"]
    while not isinstance(inner, datasets.Value):
        inner = inner.feature
    assert inner.dtype == "float32"
    assert_vectors(found, model_dir, layers)


def test_words_and_pooling(model_dir):
    words = [["New York", "'s"], [], ["a"]]
    data = datasets.Dataset.from_dict({"words": words})
    found = data.map(Embedder(str(model_dir), "words", layers="top", pooling="mean"), batched=True)
    assert found["tokens"][:] == words
    for row, vectors in zip(words, found["vectors"], strict=True):
        np.testing.assert_allclose(vectors, layers_of(model_dir, row)[-1].mean(0) if row else np.zeros(16), atol=2e-6)


@pytest.mark.slow
def test_workers_forked_from_a_parent_with_threads_do_not_wait_for_them(model_dir):
    command = [sys.executable, "-c", BUSY_PARENT, model_dir]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0 and finished.stdout.split()[-1] == "200", finished.stderr


def test_an_embedder_is_pickled_without_the_model_until_its_files_change(model_dir):
    """`datasets` finds a cached result by the bytes of the pickle."""
    embedder = Embedder(str(model_dir))
    before = pickle.dumps(embedder)
    first = embedder({"text": ["a"]})["vectors"][0]
    assert pickle.dumps(embedder) == before and len(before) < 5000
    np.testing.assert_array_equal(pickle.loads(before)({"text": ["a"]})["vectors"][0], first)
    (model_dir / "model.safetensors").touch()
    assert pickle.dumps(embedder) != before


def test_a_folder_is_found_from_other_working_directories(model_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(model_dir.parent)
    embedder = Embedder(model_dir.name)
    monkeypatch.chdir(tmp_path)
    assert embedder({"text": []}) == {"text": [], "tokens": [], "vectors": []}


def test_ranks_are_devices(model_dir, monkeypatch):
    """As `map(with_rank=True)` calls it."""
    devices = []
    monkeypatch.setattr(
        "modeling_elmo.run_scripts.vectors.embedder.local_device", lambda *given: devices.append(given) or "cpu"
    )
    Embedder(str(model_dir), device="cuda")({"text": ["a"]}, 3)
    assert devices == [("cuda", 3)]


@pytest.mark.parametrize(
    "options, texts, message",
    [
        ({"column": "sentence"}, ["a"], r"no column 'sentence' but \['text'\]; pass column=NAME"),
        ({}, "a play", "'text' has one row, not a batch; pass batched=True"),
        ({"batch_tokens": 0}, ["a"], "batch_tokens is 0"),
    ],
)
def test_mistakes(model_dir, options, texts, message):
    with refused(message, (ValueError, TypeError)):
        Embedder(str(model_dir), **options)({"text": texts})


@pytest.mark.parametrize("kind", [None, "numpy", "torch", "iterable"])
def test_a_row_of_words_is_not_a_batch_of_texts(model_dir, kind):
    data = datasets.Dataset.from_dict({"words": [["a", "play"], ["one"]], "id": [1, 2]})
    data = data.to_iterable_dataset() if kind == "iterable" else data.with_format(kind)
    embedder = Embedder(str(model_dir), "words", layers="top")
    with refused("'words' has one row, not a batch; pass batched=True"):
        list(data.map(embedder))
    rows = list(data.map(embedder, batched=True))
    np.testing.assert_allclose(rows[0]["vectors"], layers_of(model_dir, ["a", "play"])[-1], atol=TOLERANCE)
    if kind is None:
        with refused("'words' has one row"):
            data.remove_columns("id").map(embedder)


@pytest.fixture
def ray(monkeypatch, model_dir):
    """Its workers have the working directory of its start."""
    if find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "modeling-elmo[ray]"')
    import ray

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(model_dir.parent)
    ray.init(num_cpus=4, include_dashboard=False)  # logical ones: two for the workers, others for reading and writing
    yield ray
    ray.shutdown()


def test_the_example_of_the_documents_with_ray(ray, model_dir):
    """`test_readme.py` runs the other examples."""
    (code,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/integrations.md").read_text("utf-8"), re.DOTALL)
    Path("tests").symlink_to(ROOT / "tests")
    names = {}
    exec(code.replace("model_cards/elmo-small-en", str(model_dir)), names)
    rows = ray.data.read_parquet("vectors").take_all()
    lines = [line for line in (ROOT / "tests/fixtures/demo/play.txt").read_text("utf-8").splitlines() if line]
    assert sorted(row["text"] for row in rows) == sorted(lines)
    assert_vectors(rows, model_dir, "average")
