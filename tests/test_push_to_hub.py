import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts import push_to_hub
from modeling_elmo.run_scripts.model_card import write_results

TOKEN = "hf_" + "x" * 34
WORDS = ["<S>", "</S>", "<UNK>", "A", "sentence", "in", "words"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A language model with a card written by hand, and what its training left beside it."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    tokenizer = ELMoTokenizer(tmp_path / "vocab.txt")
    folder = tmp_path / "trained"
    ELMoForPreTraining(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\nBy hand.\n", encoding="utf-8")
    (folder / "curve.png").write_bytes(b"picture")
    write_results(folder, "nearest_neighbors", {"word": "play"})
    (folder / "checkpoint-7").mkdir()
    for name in ("training_args.bin", "settings.json", "predictions_test.jsonl", ".hidden", "checkpoint-7/config.json"):
        (folder / name).write_text(TOKEN)
    return folder


@pytest.fixture
def trusting(monkeypatch):
    """Without the clean process, which takes seconds."""
    monkeypatch.setattr(push_to_hub, "verify", lambda *_: "not compared")


@pytest.fixture
def hub(monkeypatch) -> list:
    """The calls of `HfApi`; the last one raises what `hub.error` is."""
    calls = []

    class Hub:
        def __init__(self, **options):
            calls.append(("HfApi", options))

        def create_repo(self, name, **options):
            calls.append(("create_repo", {"name": name, **options}))
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, **options):
            paths = [path.relative_to(options["folder_path"]).as_posix() for path in options["folder_path"].rglob("*")]
            sent = set(filter_repo_objects(paths, allow_patterns=options["allow_patterns"]))
            calls.append(("upload_folder", options | {"sent": sent}))

    monkeypatch.setattr(push_to_hub, "HfApi", Hub)
    return calls


def send(folder: Path, *more: str):
    return push_to_hub.main(["--model", str(folder), "--repo_id", "someone/elmo-xy", *more])


def test_a_dry_run_assembles_and_checks_and_sends_nothing(folder, hub, capsys):
    found = send(folder, "--output_dir", str(folder.parent / "assembled"), "--dtype", "float16", "--license", "mit")
    assert not hub and found == folder.parent / "assembled"
    printed = capsys.readouterr().out
    assert "Nothing was sent. With --push it goes to someone/elmo-xy." in printed
    difference = float(re.search(r"largest difference to .* (\S+), root", printed)[1])
    assert 0 < difference < 0.01  # of half precision

    weights = load_file(found / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    model, original = (ELMoForPreTraining.from_pretrained(place) for place in (found, folder))
    assert model.dtype == torch.float32
    for name, weight in original.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight.half().float(), rtol=0, atol=0)
    assert ELMoTokenizer.from_pretrained(found).get_vocab() == ELMoTokenizer.from_pretrained(folder).get_vocab()

    files = {path.relative_to(found).as_posix(): path for path in found.rglob("*") if path.is_file()}
    assert {"README.md", "curve.png", "results/nearest_neighbors.json", "modeling_elmo.py"} <= set(files)
    assert not {"training_args.bin", "settings.json", "predictions_test.jsonl", ".hidden"} & set(files)
    assert not [name for name in files if "checkpoint-7" in name]
    sizes = {name: int(size.replace(",", "")) for size, name in re.findall(r"^ *([\d,]+)  (\S+)$", printed, re.M)}
    assert sizes == {name: path.stat().st_size for name, path in files.items()}
    contents = b"".join(path.read_bytes() for path in files.values())
    assert TOKEN.encode() not in contents and str(folder.parent).encode() not in contents


def test_a_card_stays_unless_it_is_given_new_facts(folder, trusting):
    kept = send(folder, "--output_dir", str(folder.parent / "kept"))
    assert (kept / "README.md").read_text(encoding="utf-8") == (folder / "README.md").read_text(encoding="utf-8")
    (folder.parent / "why.md").write_text("From speeches.", encoding="utf-8")
    facts = ["--license", "cc-by-sa-4.0", "--language", "en", "ko", "--license_reason", "The text is, too."]
    facts += ["--citation", str(folder.parent / "why.md"), "--dataset_tags", "someone/text"]
    facts += ["--data_statement", str(folder.parent / "why.md")]
    new = send(folder, "--output_dir", str(folder.parent / "new"), *facts)
    card = ModelCard.load(new / "README.md")
    assert (card.data.license, card.data.language, card.data.datasets) == (
        "cc-by-sa-4.0",
        ["en", "ko"],
        ["someone/text"],
    )
    assert "By hand" not in card.text and "`cc-by-sa-4.0`. The text is, too." in card.text
    assert (
        "## Data\n\nFrom speeches.\n" in card.text
        and card.text.rstrip().endswith("From speeches.")
        and card.text.lstrip().startswith("# elmo-xy")
    )
    # what was said once need not be said again
    again = send(new, "--output_dir", str(folder.parent / "again"), "--license_reason", "Otherwise.")
    card = ModelCard.load(again / "README.md")
    assert card.data.license == "cc-by-sa-4.0" and "`cc-by-sa-4.0`. Otherwise." in card.text


def test_pushing(folder, hub, trusting):
    send(folder, "--push", "--private", "true", "--token", TOKEN)
    (_, options), (_, repo), (_, upload) = hub
    assert options == {"token": TOKEN} and repo == {"name": "someone/elmo-xy", "private": True, "exist_ok": True}
    assert upload["repo_id"] == "someone/elmo-xy"
    assert {"README.md", "config.json", "model.safetensors", "results/nearest_neighbors.json"} <= upload["sent"]
    assert not {"training_args.bin", "settings.json", "checkpoint-7/config.json"} & upload["sent"]


@pytest.mark.parametrize(
    "error",
    [
        HfHubHTTPError("500 Server Error", response=SimpleNamespace(headers={}, request=None, status_code=500)),
        ConnectionAbortedError("500 Server Error"),
    ],
)
def test_what_went_wrong_is_told(folder, hub, trusting, monkeypatch, error):
    def upload_folder(self, **options):
        raise error

    monkeypatch.setattr(push_to_hub.HfApi, "upload_folder", upload_folder)
    with pytest.raises(RuntimeError, match=r"not be sent to someone/elmo-xy: 500 Server Error\nWhat stood"):
        send(folder, "--push")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("README.md", "elmo-xy does not load, or its card's example fails:.*ZeroDivisionError"),
        ("README.md token", r"README\.md holds what looks like a token of the Hub \(hf_\.\.\.\): take it out"),
    ],
)
def test_what_must_not_be_sent(folder, hub, broken, message, request):
    if "token" in broken:
        request.getfixturevalue("trusting")
        (folder / "README.md").write_text(f"login(token='{TOKEN}')", encoding="utf-8")
    else:
        (folder / "README.md").write_text("```python\n1 / 0\n```\n", encoding="utf-8")
    with pytest.raises((RuntimeError, ValueError), match=re.compile(message, re.DOTALL)) as caught:
        send(folder, "--push")
    assert not hub and TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--repo_id": "elmo"}, "--repo_id elmo: pass user/name"),
        ({"--model": "nowhere"}, r"--model nowhere: there is no config\.json; pass the folder of a checkpoint"),
        ({"--output_dir": "."}, r"--output_dir \. is there already; pass a new folder"),
        ({"--data_statement": "nowhere.md"}, r"--data_statement nowhere\.md: there is no such file"),
    ],
)
def test_mistakes(folder, options, message, trusting):
    given = [item for option in options.items() for item in option]
    with pytest.raises((ValueError, OSError), match=message):
        send(folder, *given)


def test_a_base_model_without_a_card_gets_one(folder, trusting):
    (folder / "README.md").unlink()
    ELMoModel.from_pretrained(folder).save_pretrained(folder)
    found = send(folder, "--output_dir", str(folder.parent / "assembled"))
    text = (found / "README.md").read_text(encoding="utf-8")
    assert "None is recorded." in text and "AutoModelForPreTraining" not in text
    assert json.loads((found / "config.json").read_text())["architectures"] == ["ELMoModel"]
