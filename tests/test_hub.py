"""Uploads to the Hub and downloads from it, with the clients that users have; the Hub is `hub_server.py`.

Two processes use it: an author, who has this package and a token, and a stranger, who has neither.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_python import new_environment
from hub_server import TOKENS, Hub

ROOT = Path(__file__).parents[1]
ORIGINAL = ROOT / "tests" / "fixtures" / "elmo_fixtures" / "allennlp"
STORED_TOKEN, GIVEN_TOKEN = TOKENS  # in the author's environment; as an option
WEIGHTS = {"model.safetensors", "config.json", "configuration_elmo.py", "modeling_elmo.py", "elmo_lstm.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "tokenization_elmo.py", "elmo_characters.py"}


class Worker:
    """Calls the functions of `hub_worker.py` in another process, whose caches and log are in `home`."""

    def __init__(self, hub: Hub, home: Path, python: Path | str, *modules: str, **environment: str):
        home.mkdir()
        self.home, self.log = home, home / "log.txt"
        inherited = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTHON", "HF_", "HUGGING"))}
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
        command = [str(python), str(ROOT / "tests" / "hub_worker.py"), *modules]
        with self.log.open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self.process = subprocess.Popen(command, cwd=home, env=inherited | environment, text=True, **pipes)

    def answer(self, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps([function, arguments]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.log.read_text(errors="replace")
        return json.loads(line)

    def __call__(self, function: str, **arguments) -> Any:
        answer = self.answer(function, arguments)
        assert "found" in answer, f"{answer}\n{self.log.read_text(errors='replace')[-4000:]}"
        return answer["found"]

    def fails(self, function: str, **arguments) -> str:
        answer = self.answer(function, arguments)
        assert "error" in answer, answer
        return answer["error"]

    def stop(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
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


@pytest.fixture(scope="module")
def versions(hub, author) -> dict[str, list]:
    """The layers of `user/elmo` before its two uploads, by commit; `main` is the second."""
    found = {}
    for seed in (0, 1):
        outputs = author("push", repo="user/elmo", seed=seed)
        found[hub.repositories["user/elmo"].main] = outputs
    return found


@pytest.fixture(scope="module")
def reader(hub, author, root) -> str:
    author("save_and_push", repo="user/reader", kind="ELMoForQuestionAnswering", folder=str(root / "reader"))
    return "user/reader"


def contents(hub: Hub, repo: str) -> dict[str, bytes]:
    return {path: blob.content for path, blob in hub.repositories[repo].files.items()}


def assert_same(found: list, expected: list):
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=1e-6)


def assert_was_pushed(hub: Hub, repo: str, token: str):
    """Checks that the upload is complete, has its weights in LFS, and used this token."""
    files = hub.repositories[repo].files
    assert files.keys() >= WEIGHTS | TOKENIZER | {"README.md"}
    assert {path for path, blob in files.items() if blob.is_lfs} >= {"model.safetensors"}
    assert not [path for path, blob in files.items() if blob.is_lfs and path.endswith((".py", ".json", ".md"))]
    for file, auto_class in {"config.json": "AutoModel", "tokenizer_config.json": "AutoTokenizer"}.items():
        assert auto_class in json.loads(files[file].content)["auto_map"]
    wrote = [request for request in hub.requests if re.match(f"/api/models/{repo}/commit/", request.path)]
    assert {request.authorization for request in wrote} == {f"Bearer {token}"}


# Uploads and downloads


@pytest.fixture(scope="module")
def trained(author, root) -> list:
    """The outputs of `user/trained` before transformers' Trainer uploaded it."""
    return author("train", repo="user/trained", folder=str(root / "trained"), hub_token=GIVEN_TOKEN)


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


def test_push_to_hub(hub, stranger, versions):
    assert_was_pushed(hub, "user/elmo", STORED_TOKEN)
    assert not stranger("knows", module="modeling_elmo")
    found = stranger("load", repo="user/elmo")
    assert found["class"] == "ELMoModel" and found["module"].startswith("transformers_modules.user.elmo.")
    assert_same(found["outputs"], list(versions.values())[-1])
    found = stranger("load", repo="user/elmo", auto_class="AutoModelForTokenClassification")
    assert found["class"] == "ELMoForTokenClassification"


def test_save_pretrained_pushes(hub, author, stranger, reader, root):
    assert_was_pushed(hub, reader, STORED_TOKEN)
    assert {path.name for path in (root / "reader").iterdir()} >= WEIGHTS | TOKENIZER
    found = stranger("ask", repo=reader, trust_remote_code=True)
    expected = author("ask", repo=str(root / "reader"), trust_remote_code=True)
    assert found.pop("score") == pytest.approx(expected.pop("score"), abs=1e-6)
    assert found == expected and found["answer"]


def test_a_labeller_of_semantic_roles_is_pushed(hub, author, stranger, root):
    repo, folder, auto_class = "user/labeller", str(root / "labeller"), "AutoModelForTokenClassification"
    author("save_and_push", repo=repo, kind="ELMoForSemanticRoleLabeling", folder=folder)
    assert_was_pushed(hub, repo, STORED_TOKEN)
    sides = ((stranger, repo), (author, folder))
    found, expected = (worker("load", repo=name, auto_class=auto_class) for worker, name in sides)
    assert found["class"] == "ELMoForSemanticRoleLabeling"
    assert_same(found["outputs"], expected["outputs"])
    found, expected = (worker("label", repo=name, trust_remote_code=True)["verbs"] for worker, name in sides)
    assert [verb["verb"] for verb in found] == ["He", "is"]
    assert [verb["tags"] for verb in found] == [verb["tags"] for verb in expected]


def test_trainer_pushes(hub, stranger, trained):
    assert_was_pushed(hub, "user/trained", GIVEN_TOKEN)
    found = stranger("load", repo="user/trained", auto_class="AutoModelForTokenClassification")
    assert_same(found["outputs"], trained)


def test_our_programs_push(hub, author, stranger, ours):
    for repo, (folder, auto_class) in ours.items():
        assert_was_pushed(hub, repo, GIVEN_TOKEN)
        expected = author("load", repo=str(folder), auto_class=auto_class)
        assert_same(stranger("load", repo=repo, auto_class=auto_class)["outputs"], expected["outputs"])


def test_a_record_has_the_commit_of_its_bilm(hub, ours):
    """So that the records of another version of the same repository are noticed."""
    folder, _ = ours["user/tagger"]
    assert json.loads((folder / "run_settings.json").read_text())["model_digest"] == hub.repositories["user/bilm"].main


def test_elmo_push(hub, author, stranger, ours):
    folder, auto_class = ours["user/bilm"]
    options = {"model": folder, "repo_id": "user/published", "dtype": "float16", "license": "mit", "token": GIVEN_TOKEN}
    arguments = [str(item) for name, value in options.items() for item in (f"--{name}", value)]
    author("run_script", script="push_to_hub", arguments=arguments)
    assert "user/published" not in hub.repositories  # a dry run
    author("run_script", script="push_to_hub", arguments=[*arguments, "--push"])
    assert_was_pushed(hub, "user/published", GIVEN_TOKEN)
    files = contents(hub, "user/published")
    assert {"results/pretraining.json", "results/card.json"} <= files.keys()
    assert b"license: mit" in files["README.md"] and str(folder.parent).encode() not in files["README.md"]
    repos = ("user/published", "user/bilm")
    sizes = [len(hub.repositories[repo].files["model.safetensors"].content) for repo in repos]
    assert sizes[0] < 0.6 * sizes[1]
    found, expected = (stranger("load", repo=repo, auto_class=auto_class) for repo in repos)
    np.testing.assert_allclose(found["outputs"], expected["outputs"], rtol=0, atol=1e-2)


def test_old_versions(author, stranger, versions):
    old, new = versions
    assert not np.allclose(versions[old], versions[new])
    for worker in (author, stranger):
        assert_same(worker("load", repo="user/elmo", revision=old)["outputs"], versions[old])


def convert(weights: str, output: Path) -> dict[str, Any]:
    arguments = ["--weights", weights, "--options", "hf://user/original/options.json", "--output_dir", str(output)]
    return {"script": "convert_checkpoint", "arguments": arguments}


@pytest.fixture(scope="module")
def original(hub) -> str:
    """Converted from `hf://user/original/lm_weights.hdf5`."""
    hub.put("user/original", {path.name: path.read_bytes() for path in ORIGINAL.iterdir() if path.is_file()})
    return "hf://user/original"


def test_downloaded_files_need_no_hub(hub, author, stranger, versions, original, tmp_path):
    stranger("load", repo="user/elmo")
    author("run_script", **convert(f"{original}/lm_weights.hdf5", tmp_path / "first"))
    with hub.stopped():
        for options in ({"local_files_only": True}, {}):
            assert_same(stranger("load", repo="user/elmo", **options)["outputs"], list(versions.values())[-1])
        author("run_script", **convert(f"{original}/lm_weights.hdf5", tmp_path / "second"))
        message = stranger.fails("load", repo="user/never", local_files_only=True)
        assert "couldn't find them in the cached files" in message and "offline mode" in message
        message = author.fails("run_script", **convert("hf://user/never/w.hdf5", tmp_path / "third"))
        assert "hf://user/never/w.hdf5: the Hub cannot be reached" in message and "pass a file" in message
    assert (tmp_path / "second" / "model.safetensors").is_file()


# Models that cannot be loaded


@pytest.fixture(scope="module")
def gated(hub, versions) -> str:
    """Only one of the two tokens may read it."""
    hub.put("user/gated", contents(hub, "user/elmo"), reader=GIVEN_TOKEN)
    return "user/gated"


@pytest.fixture(scope="module")
def admitted(author, stranger, gated, root) -> list[tuple[str, dict]]:
    """For both processes: the error without that token, and the model that they load and save with it."""
    saved = {worker: str(worker.home / "saved") for worker in (stranger, author)}
    return [
        (worker.fails("load", repo=gated), worker("load", repo=gated, token=GIVEN_TOKEN, folder=folder))
        for worker, folder in saved.items()
    ]


def test_gated(admitted, versions):
    for (message, found), status in zip(admitted, (401, 403), strict=True):
        assert "gated repo" in message and "have access to it at https://huggingface.co/user/gated" in message
        assert f"{status} Client Error" in message
        assert_same(found["outputs"], list(versions.values())[-1])


@pytest.fixture(scope="module")
def secret(hub) -> str:
    """Nobody downloads it, so that no cache has it."""
    hub.put("user/secret", {}, reader=GIVEN_TOKEN)
    return "user/secret"


def test_our_programs_report_models_they_cannot_load(author, secret, tmp_path):
    text, output = tmp_path / "text.txt", str(tmp_path / "output.hdf5")
    text.write_text("He is in London .\n")
    for script, model, data, *others in (
        ("embed", "--model", "--input", "--output", output),
        ("perplexity", "--model", "--validation_file"),
        ("run_pretraining", "--model_name_or_path", "--train_file", "--output_dir", output),
    ):
        arguments = [data, str(text), *others, model]
        message = author.fails("run_script", script=script, arguments=[*arguments, secret])
        assert re.search("user/secret: .* on the Hub failed .*`hf auth login`", message)
        message = author.fails("run_script", script=script, arguments=[*arguments, "user/missing"])
        assert "user/missing: there is no such folder" in message and "hf auth login" in message
    message = author.fails("tag", folder=str(tmp_path / "tagger"), model_name_or_path="user/missing")
    assert "user/missing: there is no such folder" in message and "hf auth login" in message


@pytest.mark.parametrize(
    "weights, said",
    [
        ("hf://user/missing/w.hdf5", ["no model user/missing", "hf auth login"]),
        ("hf://user/secret/w.hdf5", ["access to user/secret is restricted", "hf auth login"]),
        ("hf://user/original@v9/w.hdf5", ["user/original has no revision v9", "pass a branch"]),
        ("hf://user/original/w.hdf5", ["user/original has no file w.hdf5", "pass one"]),
    ],
)
def test_originals_that_cannot_be_downloaded(author, original, secret, weights, said, tmp_path):
    message = author.fails("run_script", **convert(weights, tmp_path / "converted"))
    assert message.startswith(f"FileNotFoundError: {weights}: ") and all(text in message for text in said)


# Failed uploads


@pytest.mark.parametrize("status", [500, None])
@pytest.mark.parametrize(("where", "repo", "seed"), [("PUT /lfs/", "user/weights", 2), ("/commit/", "user/commit", 3)])
def test_a_failed_upload_changes_nothing(hub, author, versions, where, repo, seed, status):
    repo, seed = f"{repo}-{status}", seed + 2 * bool(status)
    hub.put(repo, contents(hub, "user/elmo"))
    repository = hub.repositories[repo]
    main, commits = repository.main, dict(repository.commits)
    with hub.failing(where, status):
        message = author.fails("push", repo=repo, seed=seed)
    expected = "model.safetensors" if "PUT" in where else "500 Internal Server Error" if status else "disconnected"
    assert expected in message
    assert repository.main == main and repository.commits == commits
    number = len(hub.requests)
    author("push", repo=repo, seed=seed)
    uploads = [request for request in hub.requests[number:] if request.method == "PUT"]
    assert len(uploads) == ("PUT" in where)  # weights that arrived are not sent again
    assert repository.files["model.safetensors"].content != commits[main]["model.safetensors"].content


# Secrets and foreign code


def test_tokens_stay_secret(hub, reader, trained, ours, admitted, root):
    assert {request.authorization for request in hub.requests} == {None, *(f"Bearer {token}" for token in TOKENS)}
    files = [(path.relative_to(root).as_posix(), path.read_bytes()) for path in root.rglob("*") if path.is_file()]
    files += hub.contents()
    names = [name for name, content in files if any(token.encode() in content for token in TOKENS)]
    # transformers' own Trainer writes `hub_token` to a file of its arguments and uploads it.
    assert [name for name in names if not re.search("trained/.*training_args.bin", name)] == []
    assert {"author/log.txt", "author/saved/config.json", "user/tagger/README.md"} <= {name for name, _ in files}


def test_a_config_cannot_make_its_code_trusted(hub, author, stranger, reader, tmp_path):
    marker = tmp_path / "marker"
    files = contents(hub, reader)
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
        for worker in (author, stranger):
            assert "trust_remote_code=True" in worker.fails("ask", repo="user/hostile", **options)
    assert not marker.exists()
    stranger("load_part", repo="user/hostile", auto_class="AutoConfig", trust_remote_code=True)
    assert marker.exists()
