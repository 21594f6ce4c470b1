"""Uploads to the Hub and downloads from it, with the clients that users have; the Hub is `hub_server.py`.

Two processes use it: an author, who has this package and a token, and a stranger, who has neither.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from clean_python import new_environment
from hub_server import TOKENS, Hub
from places import ELMO_FIXTURES, ROOT

STORED_TOKEN, GIVEN_TOKEN = TOKENS  # in the author's environment; as an option
CODE = {"configuration_elmo.py", "modeling_elmo.py", "tokenization_elmo.py"}
WEIGHTS = {"model.safetensors", "config.json", "configuration_elmo.py", "modeling_elmo.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "tokenization_elmo.py"}

pytestmark = pytest.mark.slow  # starts a fresh interpreter with torch


class Worker:
    """Calls the functions of `hub_worker.py` in another process, whose caches and log are in `home`."""

    def __init__(self, hub, home, python, *modules, **environment):
        home.mkdir()
        self.log = home / "log.txt"
        inherited = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTHON", "HF_", "HUGGING"))}
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
        command = [str(python), str(ROOT / "tests" / "hub_worker.py"), *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log.open("w")}
        self.process = subprocess.Popen(command, cwd=home, env=inherited | environment, text=True, **pipes)

    def __call__(self, function, **arguments):
        answer = self.answer(function, arguments)
        assert "found" in answer, f"{answer}\n{self.log.read_text(errors='replace')[-4000:]}"
        return answer["found"]

    def fails(self, function, **arguments):
        return self.answer(function, arguments)["error"]

    def answer(self, function, arguments):
        print(json.dumps([function, arguments]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline() or '{"error": "the process has ended"}')

    def stop(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def author(hub, root):
    modules = ("modeling_elmo", "pretraining_worker", "task_worker")
    worker = Worker(hub, root / "author", sys.executable, *modules, PYTHONPATH=str(ROOT), HF_TOKEN=STORED_TOKEN)
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def stranger(hub, root):
    worker = Worker(hub, root / "stranger", new_environment(root / "venv"))
    yield worker
    worker.stop()


def assert_same(found, expected):
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=1e-6)


def assert_was_pushed(hub, repo, token):
    """Checks that the upload is complete and used this token."""
    files = hub.files[repo]
    assert files.keys() >= WEIGHTS | TOKENIZER | {"README.md"}
    assert {name for name in files if name.endswith(".py")} == CODE
    for file, auto_class in {"config.json": "AutoModel", "tokenizer_config.json": "AutoTokenizer"}.items():
        assert auto_class in json.loads(files[file])["auto_map"]
    tokens = {authorization for path, authorization in hub.requests if path.startswith(f"/api/models/{repo}/commit/")}
    assert tokens == {f"Bearer {token}"}


# Uploads and downloads


@pytest.fixture(scope="module")
def ours(author, root) -> dict[str, tuple[Path, str]]:
    """Folder and Auto class of the models that our programs uploaded: a biLM, and a tagger on the uploaded biLM."""
    always = {"max_steps": 2, "report_to": "tensorboard", "push_to_hub": True, "hub_token": GIVEN_TOKEN}
    author("pretrain", folder=str(root / "bilm"), hub_model_id="user/bilm", **always)
    author("tag", folder=str(root / "tagger"), model_name_or_path="user/bilm", hub_model_id="user/tagger", **always)
    return {
        "user/bilm": (root / "bilm" / "run", "AutoModelForPreTraining"),
        "user/tagger": (root / "tagger" / "run", "AutoModelForTokenClassification"),
    }


def test_push_to_hub(hub, author, stranger):
    expected = author("push", repo="user/elmo")
    assert_was_pushed(hub, "user/elmo", STORED_TOKEN)
    found = stranger("load", repo="user/elmo")
    assert found["class"] == "ELMoModel" and found["module"].startswith("transformers_modules.user.elmo.")
    assert_same(found["outputs"], expected)
    found = stranger("load", repo="user/elmo", auto_class="AutoModelForTokenClassification")
    assert found["class"] == "ELMoForTokenClassification"


def test_our_programs_push(hub, author, stranger, ours):
    for repo, (folder, auto_class) in ours.items():
        assert_was_pushed(hub, repo, GIVEN_TOKEN)
        expected = author("load", repo=str(folder), auto_class=auto_class)
        assert_same(stranger("load", repo=repo, auto_class=auto_class)["outputs"], expected["outputs"])


def test_a_record_has_the_commit_of_its_bilm(hub, ours):
    """So that the records of another version of the same repository are noticed."""
    folder, _ = ours["user/tagger"]
    assert json.loads((folder / "run_settings.json").read_text())["model_digest"] == hub.commit_of("user/bilm")


def test_elmo_push(hub, author, stranger, ours):
    folder, auto_class = ours["user/bilm"]
    options = {"model": folder, "repo_id": "user/published", "dtype": "float16", "license": "mit", "token": GIVEN_TOKEN}
    arguments = [str(item) for name, value in options.items() for item in (f"--{name}", value)]
    author("run_script", script="push_to_hub", arguments=arguments)
    assert "user/published" not in hub.files  # a dry run
    author("run_script", script="push_to_hub", arguments=[*arguments, "--push"])
    assert_was_pushed(hub, "user/published", GIVEN_TOKEN)
    files = hub.files["user/published"]
    assert {"results/pretraining.json", "results/card.json"} <= files.keys()
    assert b"license: mit" in files["README.md"] and str(folder.parent).encode() not in files["README.md"]
    assert len(files["model.safetensors"]) < 0.6 * len(hub.files["user/bilm"]["model.safetensors"])
    found, expected = (stranger("load", repo=f"user/{name}", auto_class=auto_class) for name in ("published", "bilm"))
    np.testing.assert_allclose(found["outputs"], expected["outputs"], rtol=0, atol=1e-2)


def convert(weights, output):
    arguments = ["--weights", weights, "--options", "hf://user/original/options.json", "--output_dir", str(output)]
    return {"script": "convert_checkpoint", "arguments": arguments}


def test_originals_are_downloaded(hub, author, tmp_path):
    hub.put(
        "user/original",
        {path.name: path.read_bytes() for path in (ELMO_FIXTURES / "allennlp").iterdir() if path.is_file()},
    )
    author("run_script", **convert("hf://user/original/lm_weights.hdf5", tmp_path / "converted"))
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    for weights in ("hf://user/missing/w.hdf5", "hf://user/original@v9/w.hdf5", "hf://user/original/w.hdf5"):
        message = author.fails("run_script", **convert(weights, tmp_path / "missing"))
        assert message.startswith(f"FileNotFoundError: {weights} cannot be downloaded: 404 Client Error.")


# Secrets and foreign code


def test_tokens_stay_secret(hub, author, ours, root):
    author("push", repo="user/elmo")
    assert {authorization for _, authorization in hub.requests} == {None, *(f"Bearer {token}" for token in TOKENS)}
    files = [(path.relative_to(root).as_posix(), path.read_bytes()) for path in root.rglob("*") if path.is_file()]
    files += [(f"{repo}/{path}", file) for repo, there in hub.files.items() for path, file in there.items()]
    names = [name for name, content in files if any(token.encode() in content for token in TOKENS)]
    assert names == []
    assert {"author/log.txt", "tagger/run/config.json", "user/tagger/README.md"} <= {name for name, _ in files}


def test_a_config_cannot_make_its_code_trusted(hub, author, stranger, tmp_path):
    marker = tmp_path / "marker"
    author("push", repo="user/hostile")
    files = dict(hub.files["user/hostile"])
    for path in files:
        if path.endswith(".py"):
            files[path] += f"\nopen({str(marker)!r}, 'w').close()\n".encode()
        if path.endswith("config.json"):
            files[path] = json.dumps(json.loads(files[path]) | {"trust_remote_code": True}).encode()
    hub.put("user/hostile", files)
    for options in ({}, {"trust_remote_code": False}):
        for auto_class in ("AutoConfig", "AutoTokenizer", "AutoModel"):
            part = {"repo": "user/hostile", "auto_class": auto_class, **options}
            assert "trust_remote_code=True" in stranger.fails("load_part", **part)
            assert author("load_part", **part).startswith("modeling_elmo.")
    assert not marker.exists()
    stranger("load_part", repo="user/hostile", auto_class="AutoConfig", trust_remote_code=True)
    assert marker.exists()
