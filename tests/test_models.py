"""Models that cannot be loaded, and the digest of a model, which its code and its writer do not change."""

import json
import math
import pickle

import transformers
from bilm_models import tiny_model
from errors import refused
from task_worker import bilm, read_json, written
from transformers import AutoModel

from modeling_elmo.run_scripts.program.models import check_model, load_pretrained, model_digest


def test_models_that_are_not_there(tmp_path):
    for name in ("no/such", "no/such/model", str(tmp_path)):
        with refused(f"^{name}", FileNotFoundError):
            check_model(name)
    for config, kind in (('{"model_type": "bert"}', "'bert'"), ("[]", "None")):
        (tmp_path / "config.json").write_text(config)
        with refused(f"^{tmp_path} is a {kind} model"):
            check_model(str(tmp_path))


def test_files_of_a_model_that_cannot_be_loaded(tmp_path):
    """Each is told in one line, with the folder, and no code of a pickle runs."""
    tiny_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    damaged = [(weights, content) for content in (weights.read_bytes()[:-9], b"")]
    pickles = [(tmp_path / "pytorch_model.bin", content) for content in (pickle.dumps(print, 2), b"PK\3\4 truncated")]
    for path, content in (*damaged, *pickles):
        weights.unlink(missing_ok=True)
        path.write_bytes(content)
        with refused(f"^{tmp_path} cannot be loaded: "):
            load_pretrained(AutoModel, tmp_path)


def test_a_clone_without_lfs(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 55\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with refused(f"^{tmp_path} cannot be loaded: Git LFS has not fetched model.safetensors; run `git lfs pull`"):
        load_pretrained(AutoModel, tmp_path)


def test_weights_that_are_not_numbers(tmp_path):
    model = tiny_model()
    model.scalar_mix.gamma.data.fill_(math.inf)
    model.save_pretrained(tmp_path)
    with refused(f"^{tmp_path}: the weights of scalar_mix.gamma are not finite"):
        load_pretrained(AutoModel, str(tmp_path))


def test_a_model_written_by_another_transformers_is_the_same_model(tmp_path):
    folder = bilm(tmp_path / "bilm")
    digest, config = model_digest(str(folder)), folder / "config.json"
    content = config.read_text()
    config.write_text(content.replace(transformers.__version__, "4.57.0"))
    assert config.read_text() != content and model_digest(str(folder)) == digest
    config.write_text(content.replace('"cell_clip": 3.0', '"cell_clip": 2.0'))
    assert config.read_text() != content and model_digest(str(folder)) != digest


def test_a_model_without_code_is_the_same_model(tmp_path):
    """As the shipped ones are in a clone, whose records are older than the folders without code."""
    folder = bilm(tmp_path / "bilm")
    digest = model_digest(str(folder))
    for name in ("config.json", "tokenizer_config.json"):
        content = read_json(folder / name)
        del content["auto_map"]
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        written(folder / name, text)
    for file in folder.glob("*.py"):
        file.unlink()
    assert model_digest(str(folder)) == digest
