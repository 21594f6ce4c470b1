"""The program: refused options, training a checkpoint further, and the files after training."""

import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from accelerate.state import AcceleratorState
from bilm_models import make_tokenizer, save
from endings import conclusion
from errors import refused
from huggingface_hub.errors import StrictDataclassError
from places import ELMO_FIXTURES, TEXT
from pretraining_worker import LINES, MODEL, arguments_of, assert_same, contents, options_of, pretrain, train
from safetensors.torch import load_file
from transformers import AutoModelForPreTraining

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.conversion.formats import convert_checkpoint
from modeling_elmo.conversion.tensorflow import OPTIMIZER_STATE, TensorFlowCheckpoint
from modeling_elmo.run_scripts import perplexity, run_pretraining
from modeling_elmo.run_scripts.cards import publishing
from modeling_elmo.run_scripts.cards.card import read_result, write_result
from modeling_elmo.run_scripts.pretraining import loop
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.pretraining.loop import Pretraining, PretrainingArguments
from modeling_elmo.run_scripts.program import processes
from modeling_elmo.run_scripts.program.processes import sole_run
from modeling_elmo.run_scripts.program.trackers import where_to_look

SHORT = {"max_steps": 2, "eval_steps": 100, "save_steps": 100}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A finished run; tests must not change its folder."""
    folder = tmp_path_factory.mktemp("base")
    pretrain(folder, max_steps=15, optim="adagrad", save_total_limit=2)
    return folder


def measure(folder: Path) -> perplexity.Perplexity:
    options = {"model": folder / "run", "validation_file": folder / "held_out.txt", "is_split_into_words": True}
    return perplexity.main(arguments_of(options))


def further_options(folder: Path, bilm: Path, **options) -> dict:
    """Those of `options_of` without the sizes of a new model."""
    options = {"preset": None, "vocabulary_size": None, "optim": "adagrad", **options}
    return options_of(folder, model_name_or_path=bilm, **options) | {"config_overrides": None}


# Refused options


FURTHER = {"model_name_or_path": "a", "preset": None, "config_overrides": None}


REFUSED = [
    ({"dataset": "a-name"}, "--train_file FILE ..., or --dataset NAME"),
    ({"validation_split": "test"}, "--validation_file FILE ..., or --dataset NAME with --validation_split"),
    (
        {"validation_file": None, "validation_split": "train[90%:]"},
        r"train\[90%:\] is also training data.*--split",
    ),
    (
        {"train_file": None, "resume_from_checkpoint": "last"},
        "--resume_from_checkpoint last: the training text is missing. Run the same command as before",
    ),
    ({"validation_file": "nowhere.txt"}, r"nowhere\.txt: no file found"),
    ({"dataset_config": "x"}, "--dataset_config x .* without --dataset"),
    ({"streaming": True, "max_steps": None}, "--streaming: .* --max_steps"),
    ({"early_stopping_patience": 2, "validation_file": None}, "--early_stopping_patience.*--validation_file"),
    ({"per_device_train_batch_size": 4}, "--per_device_train_batch_size 4 .* pass --per_device_train_batch_tokens"),
    ({"context": "stream"}, "--per_device_train_batch_tokens 60 .* pass --per_device_train_batch_size"),
    ({"context": "stream", "dataloader_num_workers": 2}, "--dataloader_num_workers 2 with --context stream"),
    ({"report_to": "clearml"}, "--report_to clearml: its package is not installed"),
    ({"vocabulary_size": None}, "--vocabulary_size, --vocabulary_file, --tokenizer_name"),
    ({"vocabulary_size": 3}, "--vocabulary_size 3"),
    ({"vocabulary_file": "a.txt"}, "--vocabulary_size and --vocabulary_file"),
    ({"vocabulary_size": None, "tokenizer_name": "a"}, "the tokenizer decides max_word_length.*max_word_length=12"),
    ({"config_overrides": "dropout=0.2"}, "--config_overrides dropout=0.2"),
    ({"config_overrides": '{"dropoutt": 0.2}'}, "ELMoConfig has no field `dropoutt`. Did you mean `dropout`"),
    ({"config_overrides": '{"use_characters": false}'}, "use_characters is not a field of ELMoConfig; pass "),
    ({"config_overrides": '{"projection_size": 0}'}, "`projection_size` is 0"),
    ({"config_overrides": '{"tie_word_embeddings": true}'}, "`tie_word_embeddings` is True; .*'char_vocab_size': 262"),
    ({"num_sampled": 20}, "--num_sampled 20 .* softmax of type full"),
    ({"vocabulary": "replace"}, "--vocabulary replace .* without --model_name_or_path"),
    ({"model_name_or_path": "a"}, "--preset tiny .* with --model_name_or_path"),
    (FURTHER, "--vocabulary keep with --vocabulary_size"),
    (FURTHER | {"vocabulary_size": None, "vocabulary": "extend"}, "--vocabulary extend with no new vocabulary"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[str(options)[:60] for options, _ in REFUSED])
def test_options_are_refused_before_the_text_is_read(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(Corpus, "survey", lambda *_: pytest.fail("it was read"))
    with refused(message, (ValueError, OSError, StrictDataclassError)):
        train({**options_of(tmp_path, **SHORT), **options})


def test_a_new_model_predicts_the_words_of_a_vocabulary_file(tmp_path):
    words = ["<S>", "</S>", "<UNK>", *dict.fromkeys(" ".join(LINES).split())]
    (tmp_path / "words.txt").write_text("\n".join(words), "utf-8")
    pretrain(tmp_path, **SHORT, vocabulary_size=None, vocabulary_file=tmp_path / "words.txt")
    tokenizer = ELMoTokenizer.from_pretrained(tmp_path / "run")
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == ["<PAD>", *words]


def test_a_second_run_changes_nothing(tmp_path):
    """The checkpoint that the first one is writing stays."""
    unfinished = tmp_path / "run" / ".checkpoint-7.unfinished"
    unfinished.mkdir(parents=True)
    with sole_run(tmp_path / "run"), refused("Another run is writing into .*run. Wait", FileExistsError):
        pretrain(tmp_path, **SHORT)
    assert unfinished.exists()


def test_each_process_on_its_own_is_refused(tmp_path, monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for program in (run_pretraining, perplexity):
        monkeypatch.setattr(program, "has_accelerator", lambda: True)  # else it would wait for the second process
    with refused("2 processes were started .WORLD_SIZE., but this run has 1"):
        pretrain(tmp_path, **SHORT, use_cpu=False)
    with refused("2 processes were started .WORLD_SIZE., but this run has 1"):
        measure(tmp_path)
    assert not (tmp_path / "run").exists()


OTHERS = [
    ({"preset": "original", "config_overrides": None}, r"lstm_hidden_size 4096 \(there: 12\)"),  # the defaults
    ({"config_overrides": {"dropout": 0.5}}, r"dropout 0.5 \(there: 0.1\)"),
    ({"softmax_type": "sampled"}, r"softmax_type sampled \(there: full\)"),
    ({"vocabulary_size": 130}, r"vocabulary_size 130 \(there: 120\)"),
    ({"model_name_or_path": "other"}, r"model_name_or_path other \(there: None\)"),
    ({"pre_tokenization": "whitespace"}, r"pre_tokenization whitespace \(there: moses\)"),
    ({"optim": "adamw"}, "--optim adagrad, not adamw"),
    ({"per_device_train_batch_tokens": 50}, "--per_device_train_batch_tokens 60, but here it is 50"),
    ({"gradient_accumulation_steps": 2}, None),  # may change
]


@pytest.mark.parametrize("options, message", OTHERS, ids=[str(options)[:60] for options, _ in OTHERS])
def test_a_checkpoint_of_another_run_is_refused(options, message, base, tmp_path):
    shutil.copytree(base / "run" / "checkpoint-15", tmp_path / "run" / "checkpoint-15")
    for name in ("train.txt", "held_out.txt"):
        shutil.copy(base / name, tmp_path)
    options = {"optim": "adagrad", "max_steps": 16, "resume_from_checkpoint": "last", **options}
    if message is None:
        assert pretrain(tmp_path, **options).progress.step == 16
        return
    with refused(message):
        pretrain(tmp_path, **options)
    assert not list((tmp_path / "run").glob("checkpoint-16"))


def test_resuming_in_another_folder(base, tmp_path, monkeypatch, warnings_of_transformers):
    """The best checkpoint may be in the first folder, which is told. A copy of it is published."""
    first, plain = base / "run" / "checkpoint-15", loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *arguments: replace(plain(*arguments), perplexity=1e6))
    run = pretrain(base, output_dir=tmp_path / "run", resume_from_checkpoint=first, optim="adagrad", max_steps=16)
    assert run.progress.step == 16
    AutoModelForPreTraining.from_pretrained(tmp_path / "run")
    assert "run lacks checkpoint-15, which has the lowest held-out perplexity" in warnings_of_transformers.text
    shutil.copytree(first, tmp_path / "run" / "checkpoint-15")
    pretrain(base, output_dir=tmp_path / "run", resume_from_checkpoint="last", optim="adagrad", max_steps=16)
    published, best = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", first))
    assert_same(published, best)


def test_the_card_tells_what_a_resumed_run_changed(base, tmp_path):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    first = read_result(base / "run", "pretraining")
    assert first["earlier_settings"] == []
    assert {"preset", "config_overrides", "max_steps", "optim"} <= set(first["settings"])
    again = {"optim": "adagrad", "save_total_limit": 2, "resume_from_checkpoint": "last"}
    pretrain(tmp_path, max_steps=15, **again)
    assert read_result(tmp_path / "run", "pretraining") == first  # the same options: nothing has changed

    same_model = {"preset": None, "config_overrides": '{"max_word_length": 12}'}
    train(options_of(tmp_path, max_steps=16, **again) | same_model)
    record = read_result(tmp_path / "run", "pretraining")
    assert record["settings"] == first["settings"] | {"max_steps": 16}  # the model's options are still there
    assert record["earlier_settings"] == [{"until_step": 15, "settings": first["settings"]}]
    card = (tmp_path / "run" / "README.md").read_text("utf-8")
    assert "and the settings until step 15, which differ.\n" in card and "\nmax_steps=16\n" in card


# Little text


def test_a_perplexity_stands_beside_that_of_a_unigram(base, tmp_path, warnings_of_transformers, capsys):
    """Counted here by hand. The untrained model begins near it, and is told to be worse after a bad training."""
    vocabulary = (base / "run" / "vocab.txt").read_text("utf-8").split("\n")
    texts = [(base / name).read_text("utf-8").replace("\n", " </S> ") for name in ("train.txt", "held_out.txt")]
    words, held_out = ([word if word in vocabulary else "<UNK>" for word in text.split()] for text in texts)
    counts = Counter(words)
    losses = [-math.log((counts[word] + 0.5) / (counts.total() + 0.5 * 120)) for word in held_out]
    expected = math.exp(sum(losses) / len(losses))
    first, *_, last = (each for each in read_result(base / "run", "pretraining")["log"] if "perplexity" in each)
    assert first["unigram"] == last["unigram"] == pytest.approx(expected, rel=1e-6)
    assert first["step"] == 0 and first["perplexity"] == pytest.approx(expected, rel=0.2)
    card = (base / "run" / "README.md").read_text("utf-8")
    assert f"A unigram, which only knows how often each word occurs in the training text, has {expected:.2f}." in card
    pretrain(tmp_path, max_steps=3, learning_rate=3.0)
    worse = f"is above the {expected:.2f} of a unigram, which only knows how often each word occurs"
    assert worse in warnings_of_transformers.text
    found, following = conclusion(capsys.readouterr().out)
    assert f"; a unigram, which only knows how often each word occurs, has {expected:.2f}" in found
    assert following[:4] == ["elmo", "pretrain", "--model_name_or_path", str(tmp_path / "run")]
    assert "**The model is worse.**" in (tmp_path / "run" / "README.md").read_text("utf-8")


def test_mistakes_with_little_text_are_told(tmp_path, warnings_of_transformers):
    options = options_of(tmp_path, max_steps=2, vocabulary_size=100_000)
    paragraphs = (tmp_path / "train.txt").read_text("utf-8").replace("\n", " ")
    (tmp_path / "train.txt").write_text(paragraphs, "utf-8")
    train(options)
    told = warnings_of_transformers.text
    assert "A new model hardly learns in 2 steps. Pass a larger --max_steps: 300 steps or more" in told
    assert re.search(r"lines of .*train.txt have \d{3,} words on average, like paragraphs", told)
    assert re.search(r"[\d.]+% of the held-out words are <UNK>, .* learned nothing", told)


def test_a_resumed_further_training_is_no_new_model(base, tmp_path, warnings_of_transformers):
    further = further_options(tmp_path, base / "run", max_steps=2)
    train(further)
    train(further | {"model_name_or_path": None, "max_steps": 3, "resume_from_checkpoint": "last"})
    assert "hardly learns" not in warnings_of_transformers.text


# Training a checkpoint further


@pytest.mark.parametrize("kind", ["keep", "extend", "replace"])
def test_training_a_checkpoint_further(kind, base, tmp_path):
    """The log and the card have the perplexity before and after."""
    size = None if kind == "keep" else 140
    run = train(further_options(tmp_path, base / "run", max_steps=6, vocabulary_size=size, vocabulary=kind))
    first, last = (entry for entry in run.progress.log if "perplexity" in entry)
    assert (first["step"], last["step"]) == (0, 6)
    if kind == "keep":
        assert first["perplexity"] == pytest.approx(measure(base).perplexity, rel=1e-6)
    card = (tmp_path / "run" / "README.md").read_text("utf-8")
    assert f"from {first['perplexity']:.2f} before the training" in card and f"{last['perplexity']:.2f}" in card
    assert "trained further from run" in card
    before, record = (read_result(folder / "run", "pretraining") for folder in (base, tmp_path))
    assert record["earlier_trainings"] == [{name: before[name] for name in before if name != "earlier_trainings"}]
    for each in (before, record):
        assert f" million words, {each['log'][-1]['epoch']:.2f} epochs, " in card
    after = measure(tmp_path)
    assert after.perplexity == pytest.approx(last["perplexity"], rel=1e-6)
    assert after.vocabulary_size == last["vocabulary_size"] == run.plain_model.config.vocab_size


def test_a_checkpoint_with_the_record_of_something_else(base, tmp_path, monkeypatch):
    """It is refused before the training, because the card needs all records."""
    model = shutil.copytree(base / "run", tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*"))
    write_result(model, "pretraining", {"loss": 0.5})
    monkeypatch.setattr(Pretraining, "train", lambda _: pytest.fail("it was trained"))
    with refused("pretraining.json is not the record of a run: it lacks data, log, base_model, published_step"):
        train(further_options(tmp_path, model, max_steps=2))


def test_a_base_model_that_is_gone_is_not_one_of_the_hub(base, tmp_path, monkeypatch):
    """A run that stopped may resume in another working directory, or on another disk."""
    monkeypatch.chdir(base)
    train(further_options(tmp_path, "run", max_steps=2, save_steps=1))
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoint-2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(further_options(tmp_path, "run", max_steps=2, save_steps=1, resume_from_checkpoint="last"))
    assert "base_model: " not in (run / "README.md").read_text("utf-8")
    assert read_result(run, "pretraining")["base_model"] == "run"


def test_a_model_that_became_worse_is_told(base, tmp_path, warnings_of_transformers):
    train(further_options(tmp_path, base / "run", max_steps=4, optim="adamw", learning_rate=3.0))
    told = warnings_of_transformers.text
    assert re.search(r"held-out perplexity [\d.,]+ is above the [\d.,]+ before the training", told)


def test_a_checkpoint_without_its_softmax_gets_one(tmp_path):
    """As the published originals, which have no softmax."""
    tokenizer = make_tokenizer(max_word_length=12)
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", **MODEL, vocab_size=len(tokenizer), has_softmax=False))
    bilm = save(tmp_path / "bilm", model, tokenizer)
    run = train(further_options(tmp_path, bilm, vocabulary="replace", vocabulary_size=120, max_steps=4))
    found = ELMoForPreTraining.from_pretrained(tmp_path / "run")
    assert found.config.has_softmax and found.config.vocab_size == 120
    assert [entry["step"] for entry in run.progress.log if "perplexity" in entry] == [4]  # at step 0 it is random
    assert "before the training" not in (tmp_path / "run" / "README.md").read_text("utf-8")


def test_accelerates_own_half_precision_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    AcceleratorState._reset_state(reset_partial_state=True)  # one for all runs of a process
    with refused("mixed_precision 'fp16'; pass 'no' or 'bf16'"):
        pretrain(tmp_path, max_steps=1)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("by_launcher", [False, True])
@pytest.mark.parametrize("obstacle, precision", [(None, "bf16"), ("no instructions", "no")])
def test_bfloat16_needs_its_instructions(obstacle, precision, by_launcher, tmp_path, monkeypatch):
    """Without them the run computes in float32, and its record says so."""
    monkeypatch.setattr(processes, "bfloat16_obstacle", lambda: obstacle)
    if by_launcher:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision for all runs of a process
    arguments = PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=not by_launcher)
    assert run_pretraining.make_accelerator(arguments).mixed_precision == precision
    assert arguments.bf16 == (precision == "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_survey_compares_the_text_with_the_rules_of_the_tokenizer(tmp_path, warnings_of_transformers):
    options = {**SHORT, "train_file": TEXT / "inaugural_heldout.txt"}
    pretrain(tmp_path, **options)
    assert "Pass --pre_tokenization treebank for a new model" in warnings_of_transformers.text
    warnings_of_transformers.clear()
    pretrain(tmp_path, **options, output_dir=tmp_path / "right", pre_tokenization="treebank")
    assert "pre_tokenization" not in warnings_of_transformers.text


def test_tf32_is_for_cuda(tmp_path, monkeypatch):
    accelerator, received = SimpleNamespace(num_processes=1, mixed_precision="no", log_with=["tensorboard"]), []
    monkeypatch.setattr(run_pretraining, "Accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", received.append)
    for device, tf32 in (("cuda", True), ("cuda", False), ("cpu", True)):
        accelerator.device = torch.device(device)
        run_pretraining.make_accelerator(PretrainingArguments(output_dir=str(tmp_path), tf32=tf32))
    assert received == ["high", "highest"]


# Files after training


def test_the_published_folder(base):
    folder = base / "run"
    log = read_result(folder, "pretraining")["log"]
    evaluations = {entry["step"]: entry["perplexity"] for entry in log if "perplexity" in entry}
    assert list(evaluations) == [0, 7, 14, 15]
    best = min(list(evaluations)[1:], key=evaluations.__getitem__)
    assert measure(base).perplexity == pytest.approx(evaluations[best], rel=1e-6)
    weights = contents(folder / f"checkpoint-{best}")[0]
    assert_same(load_file(folder / "model.safetensors"), weights)
    card = (folder / "README.md").read_text("utf-8")
    assert f"perplexity at step {best} is **{evaluations[best]:.2f}**" in card
    assert not list(folder.glob(".*")) and not (folder / "training_state.pt").exists()


def test_where_to_look():
    folder = Path("a run", "runs")
    assert where_to_look(["tensorboard"], folder).endswith("tensorboard --logdir 'a run/runs'")
    assert where_to_look(["trackio", "aim"], folder, "elmo").endswith(": trackio show --project elmo; aim")
    assert "in the project huggingface" in where_to_look(["wandb"], folder)
    assert where_to_look([], folder).startswith("No tracker") and "--report_to tensorboard" in where_to_look([], folder)


def test_trackers(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = pretrain(tmp_path, report_to="tensorboard", max_steps=8)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"Figures of this run: tensorboard --logdir {tmp_path / 'run' / 'runs'}"
    files = map(str, (tmp_path / "run").rglob("events.out.tfevents.*"))
    (found,) = (events for events in (EventAccumulator(file).Reload() for file in files) if events.Tags()["scalars"])
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == pytest.approx({entry["step"]: entry["loss"] for entry in run.progress.log if "loss" in entry})
    assert [event.step for event in found.Scalars("perplexity")] == [0, 7, 8]


def test_push_to_hub(tmp_path, monkeypatch):
    """`test_push_to_hub.py` tests which files are sent."""
    hub = MagicMock()
    monkeypatch.setattr(publishing, "HfApi", hub)
    with refused("--hub_model_id: .*'elmo tiny'. Pass USER/NAME."):
        pretrain(tmp_path, hub_model_id="elmo tiny", push_to_hub=True)
    options = {"hub_model_id": "someone/elmo-tiny", "hub_private_repo": True, "hub_token": "a-token"}
    pretrain(tmp_path, **SHORT, **options, push_to_hub=True, report_to="tensorboard")
    hub.assert_called_once_with(token="a-token")
    hub.return_value.create_repo.assert_called_once_with("someone/elmo-tiny", private=True, exist_ok=True)
    upload = hub.return_value.upload_folder.call_args.kwargs
    assert upload["repo_id"] == hub.return_value.create_repo.return_value.repo_id
    files = upload["allow_patterns"]
    assert not [file for file in files if re.search(r"checkpoint|training_state|tfevents|^\.", file)]
    assert {"README.md", "config.json", "model.safetensors", "modeling_elmo.py", "tokenizer.json"} <= {*files}
    sent = "".join(Path(upload["folder_path"], file).read_text("utf-8", "ignore") for file in files)
    assert "a-token" not in sent and str(tmp_path) not in sent


@pytest.mark.parametrize("kind", ["characters", "words"])
def test_adagrad_continues_with_the_accumulators_of_a_tensorflow_checkpoint(kind, tmp_path, capsys):
    source = ELMO_FIXTURES / "bilm_tf_checkpoint" / kind
    model = convert_checkpoint(TensorFlowCheckpoint, source, tmp_path / "model", optimizer_state=True)
    given = load_file(model / OPTIMIZER_STATE)
    options = {"context": "stream", "per_device_train_batch_size": 2, "unroll_steps": 10, "max_steps": 1}
    options |= {"train_file": source / "text.txt", "validation_file": None}

    def accumulators(name: str, **more) -> list[torch.Tensor]:
        training = train(further_options(tmp_path, model, output_dir=tmp_path / name, **options, **more))
        state = training.optimizers[0].state
        return [state[parameter].get("sum") for parameter in training.plain_model.parameters()]

    continued = accumulators("continued")
    assert f"Adagrad continues with the accumulators of {model / OPTIMIZER_STATE}.\n" in capsys.readouterr().out
    accumulators("other", optim="adamw")
    assert f"{model / OPTIMIZER_STATE} is for --optim adagrad; adamw begins without it." in capsys.readouterr().out
    words = tmp_path / "vocab.txt"
    words.write_text((source / "vocab.txt").read_text() + "more\n")
    accumulators("more", vocabulary="extend", vocabulary_file=words)
    assert "except for " in (told := capsys.readouterr().out) and "softmax.weight, softmax.bias." in told
    (model / OPTIMIZER_STATE).unlink()
    fresh = accumulators("fresh")
    assert "accumulators" not in capsys.readouterr().out
    names = ELMoForPreTraining.from_pretrained(model).state_dict()
    for name, with_original, without in zip(names, continued, fresh, strict=True):  # of the same squared gradients
        torch.testing.assert_close(with_original - given[name], without - 1, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("is_split_into_words", [False, True])
def test_the_record_counts_what_the_tokenizer_gives_to_the_model(is_split_into_words, tmp_path, capsys):
    long = "ა" * 16  # 48 bytes, which fit; with a comma they do not
    (tmp_path / "raw.txt").write_text(f"Well, {long}, they said (yes), and left.\n" * 9, "utf-8")
    options = {"train_file": tmp_path / "raw.txt", "validation_file": None, "vocabulary_size": 10, "max_steps": 1}
    options |= {"is_split_into_words": is_split_into_words, "config_overrides": {"max_word_length": 50}}
    pretrain(tmp_path, **options)
    found, following = conclusion(capsys.readouterr().out)
    assert found.startswith("The perplexity was not measured. Pass --validation_file")
    assert following[:4] == ["elmo", "perplexity", "--model", str(tmp_path / "run")]
    data = read_result(tmp_path / "run", "pretraining")["data"]
    expected = (7, 1) if is_split_into_words else (13, 0)
    assert (data["words"] // 9, data["cut_words"] // 9, data["longest_sentence"]) == (*expected, expected[0])
