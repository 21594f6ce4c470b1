"""`elmo push` with a stand-in for the Hub's client; test_hub.py uploads through the real one."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from bilm_models import save
from endings import conclusion
from errors import refused
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file

from modeling_elmo import (
    ELMoConfig,
    ELMoForCoreferenceResolution,
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForSemanticRoleLabeling,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
)
from modeling_elmo.run_scripts import push_to_hub
from modeling_elmo.run_scripts.cards import publishing
from modeling_elmo.run_scripts.cards.bilm_card import write_bilm_card
from modeling_elmo.run_scripts.cards.card import write_result

TOKEN = "hf_" + "x" * 34
WORDS = ["<S>", "</S>", "<UNK>", "A", "sentence", "in", "words"]
PRIVATE = {"training_args.bin", "settings.json", "predictions_test.jsonl", ".hidden", "checkpoint-7/config.json"}
PRIVATE |= {"train.txt", "notes.md", "token_counts.json"}
PRIVATE |= {"optimizer.pt", "rng_state.pth", "trainer_state.json", "training_log.json", "results/ensemble_test.jsonl"}
CLASSES = [
    (ELMoForTokenClassification, "pipeline('token-classification', "),
    (ELMoForSequenceClassification, '"text_pair": '),
    (ELMoForQuestionAnswering, "pipeline('question-answering', "),
    (ELMoForSemanticRoleLabeling, "pipeline('semantic-role-labeling', "),
    (ELMoForCoreferenceResolution, "pipeline('coreference-resolution', "),
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A language model with a card written by hand, and with the private files of its training."""
    tokenizer = ELMoTokenizer(vocab=WORDS)
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer)))
    folder = save(tmp_path / "trained", model, tokenizer)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\nBy hand.\n", "utf-8")
    (folder / "curve.png").write_bytes(b"picture")
    write_result(folder, "nearest_neighbors", {"word": "play"})
    (folder / "checkpoint-7").mkdir()
    for name in PRIVATE:
        (folder / name).write_text(TOKEN)
    return folder


@pytest.fixture
def trusting(monkeypatch):
    """Skips the clean process, which takes seconds."""
    monkeypatch.setattr(push_to_hub, "verify", lambda *_: "not verified")


@pytest.fixture
def hub(monkeypatch) -> MagicMock:
    """The class `HfApi`, whose calls are recorded."""
    hub = MagicMock()
    hub.return_value.create_repo.side_effect = lambda name, **_: SimpleNamespace(repo_id=name)
    monkeypatch.setattr(publishing, "HfApi", hub)
    return hub


def send(folder: Path, *more: str):
    return push_to_hub.main(["--model", str(folder), "--repo_id", "someone/elmo-xy", *more])


@pytest.mark.slow
def test_a_dry_run_assembles_and_checks_and_uploads_nothing(folder, hub, capsys):
    found = send(folder, "--output_dir", str(folder.parent / "assembled"), "--dtype", "float16", "--license", "mit")
    assert not hub.called and found == folder.parent / "assembled"
    printed = capsys.readouterr().out
    given = ["--model", str(folder), "--repo_id", "someone/elmo-xy"]
    assert conclusion(printed)[0] == "Dry run: nothing was uploaded."
    assert {*conclusion(printed)[1]} == {"elmo", "push", *given, "--dtype", "float16", "--license", "mit", "--push"}
    difference = float(re.search(r"differ from the outputs of .* by at most (\S+) of the root", printed)[1])
    assert 0 < difference < 0.05  # of half precision

    weights = load_file(found / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    model, original = (ELMoForPreTraining.from_pretrained(place) for place in (found, folder))
    assert model.dtype == torch.float32
    for name, weight in original.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight.half().float(), rtol=0, atol=0)
    assert ELMoTokenizer.from_pretrained(found).get_vocab() == ELMoTokenizer.from_pretrained(folder).get_vocab()

    files = {path.relative_to(found).as_posix(): path for path in found.rglob("*") if path.is_file()}
    assert {"README.md", "curve.png", "results/nearest_neighbors.json", "modeling_elmo.py"} <= set(files)
    assert not PRIVATE & set(files)
    sizes = {name: int(size.replace(",", "")) for size, name in re.findall(r"^ *([\d,]+)  (\S+)$", printed, re.M)}
    assert sizes == {name: path.stat().st_size for name, path in files.items()}
    contents = b"".join(path.read_bytes() for path in files.values())
    assert TOKEN.encode() not in contents and str(folder.parent).encode() not in contents


def test_others_can_read_the_weights(folder, trusting):
    """With the mode that the umask gives, unlike those that safetensors writes."""
    found = send(folder, "--output_dir", str(folder.parent / "new"))
    assert (found / "model.safetensors").stat().st_mode == (found / "config.json").stat().st_mode


def test_a_card_stays_unless_it_is_given_new_facts(folder, trusting):
    kept = send(folder, "--output_dir", str(folder.parent / "kept"))
    assert (kept / "README.md").read_text("utf-8") == (folder / "README.md").read_text("utf-8")
    (folder.parent / "why.md").write_text("From speeches.", "utf-8")
    facts = ["--license", "mit", "--language", "en", "ko", "--data_statement", str(folder.parent / "why.md")]
    new = send(folder, "--output_dir", str(folder.parent / "new"), *facts)
    card = ModelCard.load(new / "README.md")
    assert (card.data.license, card.data.language) == ("mit", ["en", "ko"]) and "By hand" not in card.text
    assert card.text.startswith("\n# elmo-xy\n") and "## Training data\n\nFrom speeches.\n" in card.text
    again = send(new, "--output_dir", str(folder.parent / "again"), "--license_reason", "By choice.")
    assert "`mit`.\nBy choice.\n" in ModelCard.load(again / "README.md").text  # the earlier facts stay


LICENSE = "Warning: the card has no license. Pass it for a new card, as in `--license cc-by-sa-4.0`, or add a line"
LANGUAGE = "Warning: the card has no language. Pass it for a new card, as in `--language en`, or add a line such as"
EXAMPLE = "Warning: the card's example is English. Pass --example"


@pytest.mark.parametrize(
    "front, options, expected",
    [
        ("---\nlanguage: de\n---\n", "", [LICENSE]),
        ("---\nlicense: mit\nlanguage: de\n---\n", "", []),
        ("", "", [LICENSE, LANGUAGE]),
        ("", "--license mit", [LANGUAGE]),
        ("", "--license mit --language en", []),
        ("", "--license mit --language de", [EXAMPLE]),
        ("", "--license mit --language de --example Hallo!", []),
    ],
)
def test_missing_fields_of_the_card_are_told(front, options, expected, folder, trusting, capsys):
    """Whether a card is written by hand or by the program, and with how to state them; the folder is written."""
    (folder / "README.md").write_text(front + "By hand.\n", "utf-8")
    send(folder, *options.split())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning")]
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected))


@pytest.mark.parametrize("front", [b"license: [", b"- mit", "author: Zoë".encode("latin-1")])
def test_front_matter_that_is_not_yaml(front, folder, monkeypatch):
    """It is told before the model is loaded in another process, which reads the card, too."""
    monkeypatch.setattr(push_to_hub, "verify", lambda *_: pytest.fail("it was loaded"))
    (folder / "README.md").write_bytes(b"---\n" + front + b"\n---\n")
    with refused(r"front matter of README\.md is not a YAML object in UTF-8: (?s:.*) Correct it\."):
        send(folder)


def test_pushing(folder, hub, trusting, capsys):
    (folder / "results" / "play [verb].png").symlink_to(folder / "curve.png")  # brackets are no patterns
    send(folder, "--private", "false", "--token", TOKEN)
    following = conclusion(capsys.readouterr().out)[1]
    assert following[-3:] == ["--private", "False", "--push"] and TOKEN not in following
    send(folder, "--push", "--private", "true", "--token", TOKEN)
    found, (*_, code) = conclusion(capsys.readouterr().out)
    assert re.fullmatch(r"someone/elmo-xy has \d+ files, and loads without this package\.", found)
    assert "AutoModel.from_pretrained('someone/elmo-xy', trust_remote_code=True)" in code
    hub.assert_called_once_with(token=TOKEN)
    hub().create_repo.assert_called_once_with("someone/elmo-xy", private=True, exist_ok=True)
    upload = hub().upload_folder.call_args.kwargs
    names = ["README.md", "config.json", "model.safetensors", "results/play [verb].png", *PRIVATE]
    sent = set(filter_repo_objects(names, allow_patterns=upload["allow_patterns"]))
    assert sent == set(names) - PRIVATE
    send(folder, "--push")
    assert hub().create_repo.call_args.kwargs["private"] is None  # False would publish an organization's private model


def test_a_card_is_written_again_for_the_repository(folder, trusting):
    """A card with words added by hand stays."""
    card = write_bilm_card(folder, "trained").read_text("utf-8")
    found = send(folder, "--output_dir", str(folder.parent / "assembled"))
    renamed = card.replace("# trained", "# elmo-xy").replace("'trained'", "'someone/elmo-xy'")
    assert (found / "README.md").read_text("utf-8") == renamed != card

    (folder / "README.md").write_text(card + "\nBy hand, of trained.\n", "utf-8")
    with refused(r"trained/README\.md .*'someone/elmo-xy' in place of 'trained'"):
        send(folder)
    (folder / "README.md").write_text(renamed + "\nBy hand, of trained.\n", "utf-8")
    found = send(folder, "--output_dir", str(folder.parent / "kept"))
    assert (found / "README.md").read_text("utf-8") == renamed + "\nBy hand, of trained.\n"


@pytest.mark.slow
def test_another_model_is_not_sent(folder, hub, monkeypatch):
    """The outputs of the clean process are compared with those of the source."""
    other = shutil.copytree(folder, folder.parent / "other")
    ELMoForPreTraining(ELMoConfig.from_pretrained(folder)).save_pretrained(other)  # other random weights

    def assemble(arguments, place):
        return publishing.assemble(replace(arguments, model=str(other)), place)

    monkeypatch.setattr(push_to_hub, "assemble", assemble)
    with refused(r"elmo-xy gives other outputs when it is loaded without this package: its", OSError):
        send(folder, "--push")
    assert not hub.called


@pytest.mark.parametrize(
    "there, expected",
    [([3.0, -4, -1e30], 0), ([3.0, -3, -1e30], 0.2828427), ([3.0, torch.nan, -1e30], torch.inf)],
)
def test_largest_difference(there, expected):
    """In units of the root mean square, here sqrt((9 + 16) / 2)."""
    here = torch.tensor([3.0, -4, -1e30])
    assert publishing.largest_difference(here, torch.tensor(there)) == pytest.approx(expected)
    assert publishing.largest_difference(here, torch.tensor([3.0, -4, 0])) >= 1
    assert publishing.largest_difference(here[2:], here[2:]) == 0


def test_weights_in_parts_become_one_file(folder, trusting):
    model = ELMoForPreTraining.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    found = send(folder, "--output_dir", str(folder.parent / "assembled"))
    assert [path.name for path in found.glob("*safetensors*")] == ["model.safetensors"]


def test_a_saved_vocabulary_cache_still_knows_its_words(folder, trusting):
    model, tokenizer = ELMoModel.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    model.cache_vocabulary(["A", "sentence", "밥"], tokenizer, save=True)
    model.save_pretrained(folder)
    found = ELMoModel.from_pretrained(send(folder, "--output_dir", str(folder.parent / "new"), "--dtype", "float16"))
    computed = []
    found.compute_words = lambda words: computed.extend(words) or ELMoModel.compute_words(found, words)
    with torch.no_grad():
        found(**tokenizer([["A", "sentence", "밥"]], is_split_into_words=True, return_tensors="pt"))
    assert not computed


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "example"), CLASSES)
def test_a_head_without_a_record(folder, cls, example):
    """The stock Trainer or a loop leaves none. The card's example is run, and the logits are compared."""
    config = ELMoConfig.from_pretrained(folder, task_hidden_size=8, classifier="esim", id2label={0: "O", 1: "B-X"})
    head = save(folder.parent / "head", cls(config), ELMoTokenizer.from_pretrained(folder))
    text = (send(head, "--output_dir", str(folder.parent / "new")) / "README.md").read_text("utf-8")
    assert example in text and "bilm" not in text and "Its quality was not recorded" in text


def test_a_failed_upload_is_reported(folder, hub, trusting):
    hub().upload_folder.side_effect = ConnectionAbortedError("500 Server Error")
    with refused(r"to someone/elmo-xy failed: 500 Server Error\nThe repository is unchanged", OSError):
        send(folder, "--push")


@pytest.mark.slow
def test_a_card_whose_example_fails(folder, hub):
    (folder / "README.md").write_text("```python\n1 / 0\n```\n", "utf-8")
    with refused("(?s)does not load, or its card's example fails:.*ZeroDivisionError", OSError):
        send(folder, "--push")
    assert not hub.called


@pytest.mark.parametrize("linked", ["results", "LICENSE"])
def test_a_link_that_leaves_the_folder(folder, hub, trusting, linked):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "notes.md").write_text("private")
    shutil.rmtree(folder / "results")
    (folder / linked).symlink_to(outside if linked == "results" else outside / "notes.md")
    for call in (lambda: send(folder, "--push"), lambda: publishing.push(folder, "someone/elmo-xy", "message")):
        with refused(r"is a link to .*outside.*notes\.md, outside the folder"):
            call()
    assert not hub.called


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repo_id", "me/a--b"], "me/a--b"),
        (["--model", "nowhere"], "--model nowhere"),
        (["--output_dir", "."], r"--output_dir \. exists already"),
        (["--model", "bert"], "bert is a 'bert' model"),
        (["--model", "other"], "other has the architecture BertModel"),
        (["--model", "quantized", "--dtype", "float16"], "--dtype float16: quantized"),
        (["--model", "damaged"], r"damaged/results/pretraining\.json is not JSON"),
    ],
)
def test_mistakes(folder, options, message, trusting, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for name, changes in (("bert", {"model_type": "bert"}), ("other", {"architectures": ["BertModel"]})):
        path = Path(shutil.copytree(folder, name), "config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    for module in ("base", "kernels.int8"):  # on every processor
        monkeypatch.setattr(f"modeling_elmo.{module}.int8_obstacle", lambda: None)
    ELMoForPreTraining.from_pretrained(folder).quantize().save_pretrained(shutil.copytree(folder, "quantized"))
    Path(shutil.copytree(folder, "damaged"), "results", "pretraining.json").write_text("{")
    with refused(message, (ValueError, OSError)):
        send(folder, *options)


def test_a_base_model_without_a_card_gets_one(folder, trusting):
    (folder / "README.md").unlink()
    ELMoModel.from_pretrained(folder).save_pretrained(folder)
    found = send(folder, "--output_dir", str(folder.parent / "assembled"))
    text = (found / "README.md").read_text("utf-8")
    assert "No license is recorded." in text and "AutoModelForPreTraining" not in text
    assert json.loads((found / "config.json").read_text())["architectures"] == ["ELMoModel"]


def test_the_clean_process_needs_no_locale(monkeypatch, folder):
    """It gets ASCII only, and its output, which the card's example prints, is read as UTF-8 on every system."""
    run = MagicMock(side_effect=InterruptedError)
    monkeypatch.setattr(publishing.subprocess, "run", run)
    with pytest.raises(InterruptedError):
        publishing.verify(folder / "someone" / "model", SimpleNamespace(repo_id="someone/model", model=str(folder)))
    (command,), options = run.call_args
    assert all(map(str.isascii, command)) and json.loads(command[-1]) == publishing.TEXTS
    assert options["encoding"] == "utf-8" and options["env"]["PYTHONIOENCODING"] == "utf-8"
