"""The server of docs/serving/, in this process and in an environment without the package."""

import importlib.util
import re
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from bilm_models import make_tokenizer, save, tiny_model
from clean_python import ROOT, new_environment, run

from modeling_elmo import ELMoForTokenClassification, ELMoModel, ELMoTokenizer

SERVING = ROOT / "docs" / "serving"
TEXTS = ["They play chess.", "A naïve (Zürich) «ægithales» 밥!", "play", " ".join(["He said it again."] * 40)]
ASK = "import server; print(server.vectors('They play chess.')['words'])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The files of docs/serving/ with a biLM."""
    pytest.importorskip("fastapi")
    folder = shutil.copytree(SERVING, tmp_path_factory.mktemp("serving") / "server")
    save(folder / "model", tiny_model(), make_tokenizer("play"))
    return folder


@pytest.fixture(scope="module")
def client(folder):
    from fastapi.testclient import TestClient

    spec = importlib.util.spec_from_file_location("server", folder / "server.py")
    server = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL", str(folder / "model"))
        patch.setenv("THREADS", str(torch.get_num_threads()))
        spec.loader.exec_module(server)
    return TestClient(server.app)


def ask(client, text: str) -> dict:
    answer = client.post("/vectors", json={"text": text})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_are_the_words_and_vectors_of_the_model(client, folder):
    model, tokenizer = (cls.from_pretrained(folder / "model") for cls in (ELMoModel, ELMoTokenizer))
    for text in TEXTS:
        found = ask(client, text)
        assert "".join(found["words"]) == text.replace(" ", "")
        with torch.no_grad():
            expected = model(**tokenizer(text, return_tensors="pt")).elmo_embeddings[0, 1:-1]
        assert torch.equal(torch.tensor(found["vectors"]), expected)


@pytest.mark.parametrize(("number", "tolerance"), [(1, 0), (2, 1e-6)])
def test_eight_threads_get_the_answers_of_one(client, number, tolerance):
    """With one thread of torch bit for bit; they share more threads, which changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        alone = [ask(client, text) for text in TEXTS]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda text: ask(client, text), TEXTS * 8))
    finally:
        torch.set_num_threads(before)
    for answer, expected in zip(found, alone * 8, strict=True):
        assert answer["words"] == expected["words"]
        torch.testing.assert_close(
            *(torch.tensor(each["vectors"]) for each in (answer, expected)), rtol=0, atol=tolerance
        )


def test_other_requests(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert ask(client, "") == ask(client, " ") == {"words": [], "vectors": []}
    assert ask(client, "a" * 5000)["words"] == ["a" * 5000]
    refused = client.post("/vectors", json={"text": "a" * 5001})
    assert refused.status_code == 413 and re.search("5001 characters.*at most 5000", refused.json()["detail"])
    assert [client.post("/vectors", json=given).status_code for given in ({}, {"text": ["play"]})] == [422, 422]


def test_the_image_has_the_tested_versions():
    pinned = {*re.findall(r"\w+==[\d.]+", (SERVING / "Dockerfile").read_text())}
    tested = {line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {pin for pin in pinned if pin.startswith(("torch", "transformers"))} == pinned & tested and len(pinned) == 4


def test_the_lines_for_a_tagger(tmp_path, monkeypatch):
    """Its word vectors, and so its vocabulary, are in lower case."""
    pytest.importorskip("fastapi")
    page = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    imported, loaded, *last = re.search("A tagger needs .*?```py\n(.*?)```", page, re.DOTALL)[1].strip().split("\n\n")
    code = (SERVING / "server.py").read_text("utf-8")
    code = re.sub("tokenizer = .*\nmodel = .*", loaded, code.replace("from transformers import AutoModel", imported))
    code = code.partition("    inputs = ")[0] + "".join(f"    {line}\n" for line in last[0].splitlines())
    (tmp_path / "server.py").write_text(code.replace("pipeline, AutoTokenizer", "pipeline"), "utf-8")
    tokenizer = make_tokenizer("barack", lowercase_unknown=True)
    options = {"word_embedding_size": 4, "id2label": {0: "O", 1: "B-PER"}}
    model = tiny_model(ELMoForTokenClassification, vocab_size=len(tokenizer), **options)
    with torch.no_grad():
        model.classifier.bias[1] = 100.0  # every word is an entity
    save(tmp_path / "model", model, tokenizer)
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    server = runpy.run_path(str(tmp_path / "server.py"))
    found = server["vectors"]("Barack came.")["entities"]
    assert [entity["word"] for entity in found] == ["Barack", "came", "."]
    assert all(isinstance(entity["score"], float) for entity in found)


@pytest.mark.slow
def test_the_folder_is_enough(folder, tmp_path):
    """In the image where docker runs, whose base and packages come from the network; else in a new environment."""
    if shutil.which("docker") and not subprocess.run(["docker", "version"], capture_output=True).returncode:
        run("docker", "build", "--tag", "elmo-serving", ".", cwd=folder)
        options = ("--rm", "--read-only", "--tmpfs", "/tmp")
        printed = run("docker", "run", *options, "elmo-serving", "python", "-c", ASK, cwd=folder)
    else:
        homes = {name: str(tmp_path / name) for name in ("HF_HOME", "HF_MODULES_CACHE")}
        printed = run(new_environment(tmp_path / "python"), "-c", ASK, cwd=folder, **homes)
    assert printed == "['They', 'play', 'chess', '.']\n"
