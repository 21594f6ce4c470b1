"""Folders of former versions, whose code was a copy of each file of the package, load and are saved again."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from bilm_models import save, tiny_model
from clean_python import new_environment, run
from places import FIXTURES
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, pipeline

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoForQuestionAnswering, ELMoModel, ELMoTokenizer
from modeling_elmo.shipping import generate

ARCHIVE = FIXTURES / "folder_of_19_files.zip"  # a small reader
QUESTION, CONTEXT = "Where is he?", "He is in London."
# Printed by the version that saved the folder: the logits of the start, at "no answer" and at the context's words.
STARTS = [0.0157, -0.0279, -0.0370, -0.0410, -0.0441, -0.0408]
NEW = {"configuration_elmo.py", "modeling_elmo.py", "tokenization_elmo.py"}
OF_TOKENIZER = {"elmo_characters.py", "elmo_pretokenization.py"}


@pytest.fixture
def folder(tmp_path):
    shutil.unpack_archive(ARCHIVE, tmp_path / "reader")
    return tmp_path / "reader"


def code_in(folder):
    return {path.name for path in folder.glob("*.py")}


def starts_of(model, tokenizer):
    with torch.no_grad():
        logits = model.eval()(**tokenizer(QUESTION, CONTEXT, return_tensors="pt")).start_logits[0]
    return logits[logits > -1e3]


def test_a_former_folder_loads_with_the_package(folder):
    assert len(code_in(folder)) == 19
    for trust in ({}, {"trust_remote_code": True}):
        model = AutoModelForQuestionAnswering.from_pretrained(folder, **trust)
        assert type(model) is ELMoForQuestionAnswering
        found = starts_of(model, AutoTokenizer.from_pretrained(folder, **trust))
        torch.testing.assert_close(found, torch.tensor(STARTS), rtol=0, atol=1e-4)
    answers = [
        pipeline("question-answering", str(folder), trust_remote_code=True)(question=QUESTION, context=CONTEXT),
        pipeline("extractive-question-answering", model=model, tokenizer=ELMoTokenizer.from_pretrained(folder))(
            question=QUESTION, context=CONTEXT
        ),
    ]
    assert answers[0] == pytest.approx(answers[1])


WITH_ITS_OWN_CODE = """
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("reader", trust_remote_code=True)
model = AutoModelForQuestionAnswering.from_pretrained("reader", trust_remote_code=True).eval()
logits = model(**tokenizer(%r, %r, return_tensors="pt")).start_logits[0]
torch.save(logits[logits > -1e3].detach(), "starts.pt")
model.save_pretrained("again")
tokenizer.save_pretrained("again")
"""


@pytest.mark.slow
def test_a_former_folder_loads_with_its_own_code(folder, tmp_path):
    """It saves the same code again."""
    code = WITH_ITS_OWN_CODE % (QUESTION, CONTEXT)
    run(new_environment(tmp_path / "venv"), "-c", code, cwd=tmp_path, HF_HOME=str(tmp_path / "home"))
    torch.testing.assert_close(torch.load(tmp_path / "starts.pt"), torch.tensor(STARTS), rtol=0, atol=1e-4)
    assert code_in(tmp_path / "again") == code_in(folder)


def test_saving_into_a_former_folder_leaves_its_code_and_names_it(folder, caplog):
    """A file that a user put there is read no more than before, and not named."""
    (folder / "elmo_script.py").touch()
    former = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    model, tokenizer = ELMoForQuestionAnswering.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    model.save_pretrained(folder)
    [warning] = caplog.messages
    left = former.keys() - NEW - OF_TOKENIZER - {"elmo_script.py"}
    beginning = f"{folder}: the code is in configuration_elmo.py and modeling_elmo.py now, and nothing reads"
    assert warning == f"{beginning} {', '.join(sorted(left))} any more; delete these files." and len(left) == 14
    caplog.clear()
    tokenizer.save_pretrained(folder)
    [warning] = caplog.messages
    assert f"nothing reads {', '.join(sorted(OF_TOKENIZER))} any more; delete these files." in warning
    caplog.clear()
    save(folder, model, tokenizer)
    assert caplog.messages == []
    found = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert found == former | {name: generate(name) for name in NEW}
    config = json.loads((folder / "config.json").read_text())
    references = [*config["auto_map"].values(), config["custom_pipelines"]["question-answering"]["impl"]]
    assert {reference.split(".")[0] for reference in references} == {"configuration_elmo", "modeling_elmo"}
    found = starts_of(ELMoForQuestionAnswering.from_pretrained(folder), tokenizer)
    torch.testing.assert_close(found, torch.tensor(STARTS), rtol=0, atol=1e-4)


def test_a_damaged_former_folder_is_saved_into(folder, caplog):
    (folder / "config.json").write_bytes(b"\xff{")
    (folder / "elmo_characters.py").unlink()
    save(folder, tiny_model(), ELMoTokenizer())
    assert len(caplog.messages) == 1 and "nothing reads elmo_pretokenization.py any more" in caplog.text


def test_code_of_others_stays(tmp_path, monkeypatch):
    """A class of a user, in a file beside the folder's, is saved as transformers saves it."""
    lines = [
        "from modeling_elmo import ELMoForTokenClassification",
        "class MyTagger(ELMoForTokenClassification):",
        "    pass",
    ]
    (tmp_path / "my_tagger.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    from my_tagger import MyTagger

    MyTagger.register_for_auto_class("AutoModelForTokenClassification")
    model = MyTagger(ELMoConfig.from_preset("tiny", task_num_layers=1))
    model.save_pretrained(tmp_path / "saved")
    auto_map = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForTokenClassification"] == "my_tagger.MyTagger"
    assert auto_map["AutoModel"] == "modeling_elmo.ELMoModel"
    assert code_in(tmp_path / "saved") == {"configuration_elmo.py", "modeling_elmo.py", "my_tagger.py"}
    model.save_pretrained(tmp_path / "saved")
    assert code_in(tmp_path / "saved") == {"configuration_elmo.py", "modeling_elmo.py", "my_tagger.py"}


@pytest.mark.parametrize("kind", ["config", "model", "tokenizer"])
def test_code_is_uploaded(tmp_path, monkeypatch, kind):
    """Into a new folder, and into one that has it already."""
    uploads = []
    repository = type("Repository", (), {"repo_id": "someone/elmo"})
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: repository)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", lambda *_, operations, **__: uploads.extend(operations))
    config = ELMoConfig.from_preset("tiny")
    part = {"config": config, "model": ELMoModel(config), "tokenizer": ELMoTokenizer()}[kind]
    for _ in range(2):
        uploads.clear()
        part.save_pretrained(str(tmp_path / "elmo"), push_to_hub=True)
        code = {upload.path_in_repo for upload in uploads if upload.path_in_repo.endswith(".py")}
        assert code == ({"tokenization_elmo.py"} if kind == "tokenizer" else NEW - {"tokenization_elmo.py"})


def test_a_saved_pipeline_has_no_other_code(tmp_path):
    """Its class is registered for a task, and in the file of the model."""
    config = ELMoConfig.from_preset("tiny", task_num_layers=1)
    for task, kind in (
        ("extractive-question-answering", "ELMoForQuestionAnswering"),
        ("coreference-resolution", "ELMoForCoreferenceResolution"),
    ):
        model = getattr(modeling_elmo, kind)(config)
        pipeline(task, model=model, tokenizer=ELMoTokenizer()).save_pretrained(tmp_path / kind)
        assert code_in(tmp_path / kind) == NEW
