import json
import os
import shutil
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from endings import conclusion
from errors import refused
from places import ELMO_FIXTURES, ROOT

from modeling_elmo.conversion.files import read_arrays
from modeling_elmo.run_scripts import convert_checkpoint, push_to_hub
from modeling_elmo.run_scripts.convert_checkpoint import main
from modeling_elmo.tokenization.tokenization_elmo import ELMoTokenizer

WEIGHTS, OPTIONS = ELMO_FIXTURES / "allennlp" / "lm_weights.hdf5", ELMO_FIXTURES / "allennlp" / "options.json"
ALLENNLP = ["--weights", str(WEIGHTS), "--options", str(OPTIONS)]
SHIPPED = ROOT / "model_cards" / "elmo-small-en"


def test_there_and_back_with_softmax_and_vocabulary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("v.txt").write_text("<S>\n</S>\n<UNK>\nword\n")
    with h5py.File("s.hdf5", "w") as file:
        file["softmax/W"], file["softmax/b"] = np.ones((4, 16), np.float32), np.arange(4, dtype=np.float32)
    given = [
        "--vocabulary",
        "v.txt",
        "--softmax",
        "s.hdf5",
        "--license",
        "mit",
        "--origin",
        "https://example.org/~me/elmo",
    ]
    main([*ALLENNLP, *given, "--output_dir", "model"])
    printed = capsys.readouterr().out
    assert "AutoModel.from_pretrained('model', trust_remote_code=True)" in printed
    found, following = conclusion(printed)
    assert found == "Converted back, 35 of 35 arrays equal the original arrays bit for bit."
    assert following[:4] == ["elmo", "embed", "--model", "model"]
    card = Path("model", "README.md").read_text("utf-8")
    assert "converted from <https://example.org/~me/elmo>, and not trained here.\n" in card and "license: mit\n" in card
    assert "35 of 35 arrays equal the original arrays bit for bit" in card
    assert "name = 'model'  # path of this folder" in card and "| lm_weights.hdf5 | " in card
    new = ["--weights", "w.hdf5", "--options", "o.json", "--vocabulary", "v2.txt", "--softmax", "s2.hdf5"]
    main(["--to_original", "model", *new])
    assert json.loads(Path("o.json").read_text()) == json.loads(OPTIONS.read_text())
    assert Path("v2.txt").read_text() == Path("v.txt").read_text()
    for found, expected in (("w.hdf5", WEIGHTS), ("s2.hdf5", "s.hdf5")):
        found, expected = read_arrays(Path(found)), read_arrays(Path(expected))
        assert found.keys() == expected.keys() and all(map(torch.equal, found.values(), expected.values()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (ALLENNLP, "Pass --output_dir"),
        (["--to_original", "model", *ALLENNLP, "--output_dir", "x"], "Pass --output_dir"),
        (["--to_original", str(SHIPPED), "--weights", "w.hdf5"], "--weights and --options: pass both."),
        (["--to_original", str(SHIPPED), "--weights", "x", "--options", "x"], "x exists, or is named twice; pass"),
        (["--weights", "w.hdf5", "--output_dir", "x"], "w.hdf5 is a single file; pass"),
        (["--weights", "encoder.pkl", "--output_dir", "x"], "has no config.json that names an architecture; pass it"),
        (["--to_original", str(SHIPPED), "--weights", "x", "--step", "4"], "--step 4 has no effect with --to_original"),
        (["--to_original", str(SHIPPED), "--weights", "x", "--language", "en"], "--language .* has no effect with"),
    ],
)
def test_options_that_cannot_be_combined(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("encoder.pkl", "w.hdf5"):
        Path(name).touch()
    with refused(message, (ValueError, FileExistsError, FileNotFoundError)):
        main(arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"encoder.pkl", "w.hdf5"}


@pytest.mark.parametrize("kind", ["characters", "words"])
def test_a_tensorflow_checkpoint_is_recognized(tmp_path, capsys, kind):
    """Its folder has HDF5 weights, too, as archives of NLPL have."""
    source = ELMO_FIXTURES / "bilm_tf_checkpoint" / kind
    main(["--weights", str(source), "--output_dir", str(tmp_path / "model"), "--step", "180", "--optimizer_state"])
    assert f"{source}: a TensorFlow checkpoint of bilm-tf\n" in capsys.readouterr().out
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    arrays = {"characters": 27, "words": 15}[kind]
    assert f"{arrays} of {arrays} arrays equal the original arrays bit for bit" in card
    assert "| model.ckpt-180.data-00000-of-00001 | " in card
    assert (tmp_path / "model" / "optimizer_state.safetensors").is_file()


def test_hdf5_weights_are_recognized(tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    shutil.copytree(
        ELMO_FIXTURES / "bilm_tf_checkpoint" / "words", folder, ignore=shutil.ignore_patterns("model.ckpt*")
    )
    given = ["--weights", str(folder), "--output_dir", str(tmp_path / "model"), "--pre_tokenization", "whitespace"]
    with refused("--step 1 has no effect because .* is HDF5 weights of bilm-tf or AllenNLP;"):
        main([*given, "--step", "1"])
    main(given)
    assert f"{folder}: HDF5 weights of bilm-tf or AllenNLP\n" in capsys.readouterr().out
    tokenizer = ELMoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.pre_tokenization == "whitespace" and len(tokenizer) == 33


def test_a_file_of_a_folder_is_told(tmp_path):
    source = ELMO_FIXTURES / "bilm_tf_checkpoint" / "words"
    for name in ("model.ckpt-180.index", "model.ckpt-180.data-00000-of-00001"):
        with refused(f"{name} is one file; pass the folder of the checkpoint, and --step"):
            main(["--weights", str(source / name), "--output_dir", str(tmp_path / "model")])
    with refused(f"is the prefix of a TensorFlow checkpoint; pass the folder {source}", FileNotFoundError):
        main(["--weights", str(source / "model.ckpt-180"), "--output_dir", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()


def test_folders_of_no_format_are_refused(tmp_path):
    (tmp_path / "options.json").write_text("{}")
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(
        FileNotFoundError, match="no checkpoint of a known format: .* model.bin, options.json; pass another"
    ):
        main(["--weights", str(tmp_path), "--output_dir", str(tmp_path / "model")])


def test_elmoformanylangs_there_and_back(tmp_path, capsys, monkeypatch):
    source, model = ELMO_FIXTURES / "manylangs" / "characters_and_words", tmp_path / "model"
    given = ["--weights", str(source), "--output_dir", str(model)]
    main(given)
    assert f"{source}: a checkpoint of ELMoForManyLangs\n" in capsys.readouterr().out
    card = (model / "README.md").read_text("utf-8")
    assert "30 of 30 arrays equal the original arrays bit for bit" in card and "| token_embedder.pkl | " in card
    back = ["--to_original", str(model), "--weights", str(tmp_path / "back")]
    with refused("--options o.json has no effect with --to_original"):
        main([*back, "--options", "o.json"])
    monkeypatch.setattr(push_to_hub, "verify", lambda *_: "not verified")  # which test_push_to_hub tests
    push_to_hub.main(["--model", str(model), "--repo_id", "someone/model", "--output_dir", str(tmp_path / "pushed")])
    for folder in (model, tmp_path / "pushed"):
        files = tmp_path / f"back_from_{folder.name}"
        main(["--to_original", str(folder), "--weights", str(files)])
        for name in ("char.dic", "word.dic"):
            assert (files / name).read_bytes() == (source / name).read_bytes()


def test_a_folder_without_its_card_is_never_left(tmp_path, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patches, pytest.raises(SystemExit):
        patches.setattr(convert_checkpoint, "write_bilm_card", interrupted)
        main([*ALLENNLP, "--output_dir", str(tmp_path / "model")])
    assert not [*tmp_path.iterdir()]
    main([*ALLENNLP, "--output_dir", str(tmp_path / "model")])
    assert "name = 'model'" in (tmp_path / "model" / "README.md").read_text("utf-8")
