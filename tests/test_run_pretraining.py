"""The command: what it refuses, which model it starts from, and what it leaves behind."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from clean_python import new_environment, run
from huggingface_hub.errors import StrictDataclassError
from pretraining_worker import LINES, MODEL, arguments_of, assert_same, contents, options_of, pretrain
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.conversion_elmo import convert_original_checkpoint, export_original_checkpoint
from modeling_elmo.run_scripts import perplexity, run_pretraining
from modeling_elmo.run_scripts.cards import bilm_card, publishing
from modeling_elmo.run_scripts.cards.card import read_results
from modeling_elmo.run_scripts.pretraining import loop
from modeling_elmo.run_scripts.pretraining.checkpoints import Checkpoints
from modeling_elmo.tokenization.elmo_characters import read_vocabulary

SHORT = {"max_steps": 2, "eval_steps": 100, "save_steps": 100}


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing one takes as long as a whole run here."""
    monkeypatch.setattr(bilm_card, "draw_curve", lambda *_: False)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A small run, published; its folder is not to be changed."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bilm_card, "draw_curve", lambda *_: False)
        pretrain(folder, max_steps=15, optim="adagrad", save_total_limit=2)
    return folder


# What is refused


REFUSED = [
    ({"train_file": None}, "Pass either --train_file FILE ..., or --dataset NAME"),
    ({"dataset": "a-name"}, "Pass either --train_file FILE ..., or --dataset NAME"),
    ({"vocabulary_size": None}, "needs a vocabulary: pass --vocabulary_size, --vocabulary_file or --tokenizer_name"),
    ({"vocabulary_file": "a.txt"}, "Received --vocabulary_file and --vocabulary_size; pass one of them"),
    ({"tokenizer_name": "a"}, "Received --vocabulary_size and --tokenizer_name; pass one of them"),
    ({"model_name_or_path": "a"}, "--preset is for new models, and --model_name_or_path is given"),
    ({"model_name_or_path": "a", "preset": None}, "--config_overrides is for new models, and --model_name_or_path"),
    (
        {"model_name_or_path": "a", "preset": None, "config_overrides": None},
        "--vocabulary keep with --vocabulary_size: pass `extend` or `replace`",
    ),
    (
        {"model_name_or_path": "a", "preset": None, "config_overrides": None, "vocabulary_size": None}
        | {"vocabulary": "extend"},
        "--vocabulary extend with no vocabulary: pass `extend` or `replace` together with --vocabulary_file",
    ),
    ({"vocabulary": "replace"}, "--vocabulary replace.*--model_name_or_path"),
    ({"max_steps": None, "num_train_epochs": 0}, "--max_steps -1 and --num_train_epochs 0.0: pass one above 0"),
    ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps 0: pass at least 1"),
    ({"save_total_limit": 0}, "--save_total_limit 0: pass 1 or more"),
    ({"early_stopping_patience": 0}, "--early_stopping_patience 0: pass at least 1"),
    ({"early_stopping_patience": 2, "validation_file": None}, "--early_stopping_patience.*--validation_file"),
    ({"dataloader_num_workers": 2, "context": "stream"}, "num_workers=2.*pass 0 or 1"),
    ({"dataloader_num_workers": -1}, "--dataloader_num_workers -1: pass 0 or more"),
    ({"learning_rate": -1.0}, "--learning_rate -1.0: pass a number above 0"),
    ({"softmax_type": "sampled", "num_sampled": 500}, "`num_sampled` is 500, of a vocabulary with 119 words"),
    ({"validation_split": "test"}, "Pass either --validation_file FILE ..., or --dataset NAME with --validation_split"),
    ({"validation_file": None, "validation_split": "test"}, "--validation_split.*--dataset"),
    ({"config_overrides": "dropout=0.2"}, "--config_overrides dropout=0.2.*JSON"),
    ({"config_overrides": '{"dropoutt": 0.2}'}, "ELMoConfig has no field `dropoutt`. Did you mean `dropout`"),
    ({"report_to": "no-such-tracker"}, "no-such-tracker"),
]
# What reading the text cannot tell is told before, which may take hours.
REFUSED_UNREAD = [
    ({"config_overrides": '{"projection_size": 0}'}, "`projection_size` is 0; pass an integer of at least 1"),
    ({"shuffle_buffer": 0}, "--shuffle_buffer 0: pass at least 1"),
    ({"streaming": True, "max_steps": None}, "--streaming: the length of the data set is not known; pass --max_steps"),
]


@pytest.mark.parametrize("options, message", REFUSED_UNREAD)
def test_options_are_refused_before_the_text_is_read(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(run_pretraining, "survey_once", lambda *_: pytest.fail("it was read"))
    test_options_that_contradict_each_other(options, message, tmp_path)


@pytest.mark.parametrize("options, message", REFUSED, ids=[str(options)[:60] for options, _ in REFUSED])
def test_options_that_contradict_each_other(options, message, tmp_path):
    options = {**options_of(tmp_path, **SHORT), **options}
    with pytest.raises((ValueError, TypeError, StrictDataclassError), match=message):
        run_pretraining.main(arguments_of(options))
    assert not (tmp_path / "run" / "config.json").exists()


def test_text_that_cannot_be_used(tmp_path):
    (tmp_path / "empty.txt").write_text("\n  \n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("Ein Wort\nnaïve Wörter\n".encode("latin-1"))
    with pytest.raises(ValueError, match="There is no sentence in .*empty.txt: nothing but blank lines"):
        pretrain(tmp_path, train_file=tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="latin.txt, line 2 is not UTF-8"):
        pretrain(tmp_path, train_file=tmp_path / "latin.txt")
    with pytest.raises(FileNotFoundError, match="none.txt: no file is named so"):
        pretrain(tmp_path, train_file=tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match="none.txt: no file is named so"):
        pretrain(tmp_path, validation_file=tmp_path / "none.txt")
    with pytest.raises(ValueError, match="There is no sentence in .*empty.txt"):
        pretrain(tmp_path, validation_file=tmp_path / "empty.txt")
    assert not Checkpoints(tmp_path / "run", None).all()


def test_a_vocabulary_without_unk(tmp_path):
    (tmp_path / "words.txt").write_text("<S>\n</S>\nthe\n", encoding="utf-8")
    with pytest.raises(ValueError, match="words.txt lacks <UNK>; add a line"):
        pretrain(tmp_path, vocabulary_file=tmp_path / "words.txt", vocabulary_size=None)


def test_checkpoints_are_not_overwritten(base, tmp_path):
    before = sorted((base / "run").rglob("*"))
    with pytest.raises(FileExistsError, match="run holds checkpoint-15. Go on with --resume_from_checkpoint last, or"):
        pretrain(base, max_steps=15)
    assert sorted((base / "run").rglob("*")) == before
    with pytest.raises(FileNotFoundError, match="holds no checkpoint. Leave it out to begin a new training"):
        pretrain(tmp_path, resume_from_checkpoint="last")


OTHERS = [
    ({"config_overrides": {"lstm_hidden_size": 13}}, r"lstm_hidden_size 13 \(there: 12\)"),
    ({"config_overrides": {"dropout": 0.5}}, r"dropout 0.5 \(there: 0.1\)"),
    ({"config_overrides": {"no_such": 1}}, "no_such"),
    ({"softmax_type": "sampled"}, "softmax_type.*sampled.*full"),
    ({"vocabulary_size": 90}, "vocabulary_size.*90.*120"),
    ({"optim": "adamw"}, "--optim adagrad, not adamw|optim adamw .there: adagrad"),
    ({"per_device_train_batch_tokens": 50}, "tokens_per_batch=60, but here it is 50"),
    ({"seed": 1}, "seed=42, but here it is 1"),
    ({"context": "stream"}, "SentenceBatches.*StreamWindows"),
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
    with pytest.raises(ValueError, match=message):
        pretrain(tmp_path, **options)
    assert not list((tmp_path / "run").glob("checkpoint-16"))


def test_another_preset_is_refused(base):
    options = options_of(base, optim="adagrad", resume_from_checkpoint="last", preset="small", config_overrides={})
    options["config_overrides"] = None
    with pytest.raises(ValueError, match=r"holds another model .*lstm_hidden_size 1024 \(there: 12\).*Leave these"):
        run_pretraining.main(arguments_of(options))


def test_going_on_from_an_earlier_checkpoint_does_not_mix_two_runs(base, tmp_path):
    """The later ones are of another run; whatever is done about them, what is published is of this one."""
    shutil.copytree(base / "run", tmp_path / "run")
    for name in ("train.txt", "held_out.txt"):
        shutil.copy(base / name, tmp_path)
    first = min(Checkpoints(tmp_path / "run", None).all(), key=lambda path: int(path.name.split("-")[1]))
    assert first.name != "checkpoint-15"
    options = {"optim": "adagrad", "max_steps": 15, "resume_from_checkpoint": first, "gradient_accumulation_steps": 2}
    try:
        run = pretrain(tmp_path, **options)
    except ValueError as error:
        assert "checkpoint-15" in str(error)
        return
    published = load_file(tmp_path / "run" / "model.safetensors")
    assert run.progress.best_step == 15
    assert_same(published, {name: value for name, value in run.plain_model.state_dict().items() if name in published})


def test_going_on_in_another_folder(base, tmp_path):
    """Its best checkpoint may be one of the first folder."""
    first = base / "run" / "checkpoint-15"
    with pytest.MonkeyPatch.context() as patch:
        plain = loop.evaluate

        def worse(*arguments):
            found = plain(*arguments)
            found.perplexity += 1e6
            return found

        patch.setattr(loop, "evaluate", worse)
        run = pretrain(base, output_dir=tmp_path / "run", resume_from_checkpoint=first, optim="adagrad", max_steps=16)
    assert run.progress.step == 16
    AutoModelForPreTraining.from_pretrained(tmp_path / "run")


def test_the_card_tells_what_a_resumed_run_changed(base, tmp_path):
    for name in ("run", "train.txt", "held_out.txt"):
        copy = shutil.copytree if (base / name).is_dir() else shutil.copy
        copy(base / name, tmp_path / name)
    first = read_results(base / "run", "pretraining")
    assert first["earlier_settings"] == []
    assert {"preset", "config_overrides", "max_steps", "optim"} <= set(first["settings"])
    again = {"optim": "adagrad", "save_total_limit": 2, "resume_from_checkpoint": "last"}
    pretrain(tmp_path, max_steps=15, **again)
    assert read_results(tmp_path / "run", "pretraining") == first  # the same options: nothing to tell

    options = options_of(tmp_path, max_steps=16, **again) | {"preset": None, "config_overrides": None}
    run_pretraining.main(arguments_of(options))
    record = read_results(tmp_path / "run", "pretraining")
    assert record["settings"] == first["settings"] | {"max_steps": 16}  # the model's options are still there
    assert record["earlier_settings"] == [{"until_step": 15, "settings": first["settings"]}]
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "Up to step 15 these were different: max_steps 15.\n" in card


# Which model it starts from


def test_sizes_and_overrides_of_a_new_model(tmp_path):
    run = pretrain(
        tmp_path, **SHORT, config_overrides={"cell_clip": None, "num_hidden_layers": 1}, softmax_type="sampled"
    )
    config = run.plain_model.config
    assert (config.vocab_size, config.num_hidden_layers, config.lstm_hidden_size) == (120, 1, 12)
    assert (config.softmax_type, config.num_sampled, config.max_word_length) == ("sampled", 20, 12)
    assert config.cell_clip is None
    words, _ = read_vocabulary(tmp_path / "run" / "vocab.txt")
    assert len(words) == 120 and words == run.tokenizer.convert_ids_to_tokens(range(120))
    counts = {word: sum(line.split().count(word) for line in LINES[:60]) for word in words[4:]}
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_seeds_decide_the_first_weights(tmp_path):
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        output = tmp_path / str(number)
        pretrain(tmp_path, output_dir=output, seed=seed, **SHORT)
        weights.append(load_file(output / "model.safetensors"))
    assert_same(weights[0], weights[1])
    assert not torch.equal(weights[0]["softmax.weight"], weights[2]["softmax.weight"])


def start(folder: Path, base: Path, **options):
    """What `starting_model` gives for these options."""
    options = options_of(folder, model_name_or_path=base / "run", **options)
    for name in (
        "preset",
        "config_overrides",
        "num_sampled",
        *(["vocabulary_size"] if "vocabulary_file" in options else []),
    ):
        options[name] = None
    parser = run_pretraining.HfArgumentParser(
        (
            run_pretraining.ModelArguments,
            run_pretraining.CorpusArguments,
            run_pretraining.TrainingArguments,
            run_pretraining.HubArguments,
        )
    )
    model, corpus, training, _ = parser.parse_args_into_dataclasses(arguments_of(options))
    accelerator = run_pretraining.make_accelerator(training)
    text = run_pretraining.Corpus.from_arguments(corpus)
    return run_pretraining.starting_model(model, corpus, text, Path(training.output_dir), accelerator)


def test_keeping_the_vocabulary(base, tmp_path):
    model, tokenizer = start(tmp_path, base, vocabulary_size=None)
    assert_same(model.state_dict(), ELMoForPreTraining.from_pretrained(base / "run").state_dict())
    assert tokenizer.get_vocab() == ELMoTokenizer.from_pretrained(base / "run").get_vocab()


@pytest.mark.parametrize("kind", ["extend", "replace"])
def test_words_in_both_vocabularies_keep_their_rows(kind, base, tmp_path):
    old_model, old = ELMoForPreTraining.from_pretrained(base / "run"), ELMoTokenizer.from_pretrained(base / "run")
    old_ids = old.get_vocab()
    shared = [word for word in old_ids if not word.startswith("<")][::2]
    (tmp_path / "words.txt").write_text("\n".join(["new1", *shared, "<S>", "</S>", "<UNK>", "밥"]), encoding="utf-8")
    model, tokenizer = start(tmp_path, base, vocabulary=kind, vocabulary_file=tmp_path / "words.txt")
    ids = tokenizer.get_vocab()
    expected = {*shared, "new1", "밥", "<PAD>", "<S>", "</S>", "<UNK>"} | (set(old_ids) if kind == "extend" else set())
    assert set(ids) == expected and model.config.vocab_size == len(expected) == len(model.softmax.weight)
    for word in set(ids) & set(old_ids):
        assert torch.equal(model.softmax.weight[ids[word]], old_model.softmax.weight[old_ids[word]]), word
        assert torch.equal(model.softmax.bias[ids[word]], old_model.softmax.bias[old_ids[word]]), word
        assert kind == "replace" or ids[word] == old_ids[word]
    assert_same(model.elmo.state_dict(), old_model.elmo.state_dict())
    tokens = tokenizer([["밥", "gone"]], is_split_into_words=True)["input_ids"][0]
    assert list(tokens) == [1, ids["밥"], 3, 2]


@pytest.mark.parametrize("kind", ["keep", "extend", "replace"])
def test_training_a_checkpoint_further(kind, base, tmp_path):
    """Perplexity before and after, in the log and on the card."""
    size = {"vocabulary_size": None if kind == "keep" else 140, "vocabulary": kind}
    options = options_of(tmp_path, model_name_or_path=base / "run", optim="adagrad", max_steps=6, **size)
    options |= {"preset": None, "config_overrides": None, "num_sampled": None}
    run = run_pretraining.main(arguments_of(options))
    first, last = (entry for entry in run.progress.log if "perplexity" in entry)
    assert (first["step"], last["step"]) == (0, 6)
    if kind == "keep":
        before = perplexity.main(
            ["--model", str(base / "run"), "--validation_file", str(tmp_path / "held_out.txt"), "--is_split_into_words"]
        )
        assert first["perplexity"] == pytest.approx(before.perplexity, rel=1e-6)
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert f"{first['perplexity']:.2f} before the training" in card and f"{last['perplexity']:.2f}" in card
    assert "trained further from run" in card
    after = perplexity.main(
        ["--model", str(tmp_path / "run"), "--validation_file", str(tmp_path / "held_out.txt"), "--is_split_into_words"]
    )
    assert after.perplexity == pytest.approx(last["perplexity"], rel=1e-6)
    assert after.vocabulary_size == last["vocabulary_size"] == run.plain_model.config.vocab_size


def test_words_of_raw_text_are_counted_as_the_checkpoint_splits_them(tmp_path):
    tokenizer = ELMoTokenizer(
        vocab=["<S>", "</S>", "<UNK>", "the", "play"], pre_tokenization="moses", max_word_length=12
    )
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", **MODEL, vocab_size=len(tokenizer)))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "run")
    (tmp_path / "raw.txt").write_text("The play was staged.\nThey didn't, he said.\n", encoding="utf-8")
    options = {"train_file": tmp_path / "raw.txt", "is_split_into_words": False, "vocabulary": "extend"}
    _, extended = start(tmp_path, tmp_path, output_dir=tmp_path / "new", vocabulary_size=50, **options)
    assert {"staged", ".", "said", ","} <= set(extended.get_vocab()) and "staged." not in extended.get_vocab()
    assert ELMoTokenizer(vocab_file=tmp_path / "new" / "vocab.txt").get_vocab() == extended.get_vocab()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": None}, "A new model needs a vocabulary: pass --vocabulary_size"),
        (
            {"config_overrides": {"vocab_size": 9}},
            "--config_overrides: vocab_size is that of the tokenizer; pass",
        ),
        ({"context": "stream", "dataloader_num_workers": 2}, "num_workers=2: the rows of a stream are read in order"),
        ({"validation_file": "nowhere.txt"}, r"nowhere\.txt: no file is named so"),
    ],
)
def test_what_cannot_be_is_told_before_the_text_is_counted(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(run_pretraining.Corpus, "survey", lambda self: pytest.fail("counted"))
    with pytest.raises((ValueError, OSError), match=message):
        pretrain(tmp_path, **options)


def test_a_preset_is_compared_on_resuming(base, tmp_path):
    """Also that of the original, which is the default of every field."""
    shutil.copytree(base / "run", tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds another model .*lstm_hidden_size 4096 \(there: 12\)"):
        options = options_of(tmp_path, preset="original", resume_from_checkpoint="last") | {"config_overrides": None}
        run_pretraining.main(arguments_of(options))


def test_a_checkpoint_without_its_softmax_gets_one(tmp_path):
    """The published originals come so."""
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"], max_word_length=12)
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", **MODEL, vocab_size=len(tokenizer), has_softmax=False))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "bilm")
    options = options_of(
        tmp_path, model_name_or_path=tmp_path / "bilm", vocabulary="replace", optim="adagrad", max_steps=4
    )
    options |= {"preset": None, "config_overrides": None, "num_sampled": None}
    run_pretraining.main(arguments_of(options))
    found = ELMoForPreTraining.from_pretrained(tmp_path / "run")
    assert found.config.has_softmax and found.config.vocab_size == 120


def test_a_checkpoint_in_half_precision_is_trained_in_single(base, tmp_path):
    ELMoForPreTraining.from_pretrained(base / "run", dtype=torch.bfloat16).save_pretrained(tmp_path)
    shutil.copy(base / "run" / "tokenizer.json", tmp_path)
    shutil.copy(base / "run" / "tokenizer_config.json", tmp_path)
    model, _ = load_model(str(tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_accelerates_own_half_precision_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    AcceleratorState._reset_state(reset_partial_state=True)  # one for all runs of a process
    with pytest.raises(ValueError, match="mixed_precision 'fp16'; pass 'no' or 'bf16'"):
        run_pretraining.main(arguments_of(options_of(tmp_path, max_steps=1)))
    AcceleratorState._reset_state(reset_partial_state=True)


def test_another_softmax_of_a_checkpoint(base, tmp_path):
    model, _ = start(tmp_path, base, vocabulary_size=None, softmax_type="sampled")
    assert model.config.softmax_type == model.softmax.softmax_type == "sampled"
    assert torch.equal(model.softmax.weight, ELMoForPreTraining.from_pretrained(base / "run").softmax.weight)


def test_a_tokenizer_instead_of_a_vocabulary(base, tmp_path):
    run = pretrain(tmp_path, **SHORT, tokenizer_name=base / "run", vocabulary_size=None)
    assert run.tokenizer.get_vocab() == ELMoTokenizer.from_pretrained(base / "run").get_vocab()


# What it leaves behind


def test_the_published_folder(base):
    folder = base / "run"
    log = read_results(folder, "pretraining")["log"]
    evaluations = {entry["step"]: entry["perplexity"] for entry in log if "perplexity" in entry}
    assert list(evaluations) == [0, 7, 14, 15]
    best = min(list(evaluations)[1:], key=evaluations.__getitem__)
    arguments = ["--validation_file", str(base / "held_out.txt"), "--is_split_into_words"]
    again = perplexity.main(["--model", str(folder), *arguments])
    assert again.perplexity == pytest.approx(evaluations[best], rel=1e-6)
    weights = contents(folder / f"checkpoint-{best}")[0]
    assert_same(load_file(folder / "model.safetensors"), weights)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"The weights are those of step {best}" in card and f"{evaluations[best]:.2f}" in card
    assert not list(folder.glob(".*")) and not (folder / "training_state.pt").exists()


def test_auto_classes_load_it(base):
    tokenizer = AutoTokenizer.from_pretrained(base / "run")
    inputs = tokenizer([LINES[60].split()], is_split_into_words=True, return_tensors="pt")
    model, language_model = (kind.from_pretrained(base / "run") for kind in (AutoModel, AutoModelForPreTraining))
    assert model(**inputs).last_hidden_state.shape == (1, len(LINES[60].split()) + 2, 16)
    assert math.isfinite(language_model(**inputs, labels=inputs["input_ids"]).loss)


STRANGER = """
import importlib.util, sys
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer
assert importlib.util.find_spec("modeling_elmo") is None
name = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer([sys.argv[2].split()], is_split_into_words=True, return_tensors="pt")
vectors = AutoModel.from_pretrained(name, trust_remote_code=True)(**inputs).last_hidden_state
model = AutoModelForPreTraining.from_pretrained(name, trust_remote_code=True)
print(float(vectors.double().sum()), float(model(**inputs, labels=inputs["input_ids"]).loss))
"""


def test_older_tools_get_the_original_format_with_its_softmax(base, tmp_path):
    files = [tmp_path / name for name in ("weights.hdf5", "options.json", "vocab.txt", "softmax.hdf5")]
    export_original_checkpoint(base / "run", *files)
    convert_original_checkpoint(*files[:2], tmp_path / "again", vocabulary=files[2], softmax=files[3])
    expected = load_file(base / "run" / "model.safetensors")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_stranger_loads_it(base, tmp_path):
    python = new_environment(tmp_path / "venv")
    printed = run(python, "-c", STRANGER, str(base / "run"), LINES[60], cwd=tmp_path, HF_HOME=str(tmp_path / "home"))
    found = list(map(float, printed.split()[-2:]))
    tokenizer = ELMoTokenizer.from_pretrained(base / "run")
    inputs = tokenizer([LINES[60].split()], is_split_into_words=True, return_tensors="pt")
    model = ELMoForPreTraining.from_pretrained(base / "run")
    with torch.no_grad():
        output = model(**inputs, labels=inputs["input_ids"])
        vectors = model.elmo(**inputs).last_hidden_state
    assert found == pytest.approx([float(vectors.double().sum()), float(output.loss)], rel=1e-5, abs=1e-5)


def test_trackers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = pretrain(tmp_path, report_to="tensorboard", max_steps=8)
    files = map(str, (tmp_path / "run").rglob("events.out.tfevents.*"))
    (found,) = (events for events in (EventAccumulator(file).Reload() for file in files) if events.Tags()["scalars"])
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == pytest.approx({entry["step"]: entry["loss"] for entry in run.progress.log if "loss" in entry})
    assert [event.step for event in found.Scalars("perplexity")] == [0, 7, 8]


class RecordingHub:
    """In place of `HfApi`."""

    calls: list[tuple[str, dict]] = []

    def __init__(self, **options):
        self.calls.append(("HfApi", options))

    def create_repo(self, name: str, **options):
        self.calls.append(("create_repo", {"name": name, **options}))
        return type("Repo", (), {"repo_id": f"someone/{name.split('/')[-1]}"})()

    def upload_folder(self, **options):
        self.calls.append(("upload_folder", options))


@pytest.mark.parametrize("name", [None, "someone/elmo-tiny"])
def test_push_to_hub(name, tmp_path, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects  # what HfApi chooses files with

    monkeypatch.setattr(RecordingHub, "calls", [])
    monkeypatch.setattr(publishing, "HfApi", RecordingHub)
    pretrain(
        tmp_path,
        **SHORT | {"save_steps": 1},
        push_to_hub=True,
        hub_model_id=name,
        hub_private_repo=True,
        hub_token="a-token",
        report_to="tensorboard",
    )
    (made, token), (created, repo), (uploaded, upload) = RecordingHub.calls
    assert (made, created, uploaded) == ("HfApi", "create_repo", "upload_folder")
    assert token == {"token": "a-token"}
    assert repo == {"name": name or "run", "private": True, "exist_ok": True}
    assert upload["repo_id"] == f"someone/{'elmo-tiny' if name else 'run'}"
    folder = Path(upload["folder_path"])
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files = set(filter_repo_objects(paths, allow_patterns=upload["allow_patterns"]))
    assert not [file for file in files if "checkpoint" in file or "training_state" in file or file.startswith(".")]
    assert not [file for file in files if "tfevents" in file]
    assert files >= {"config.json", "model.safetensors", "modeling_elmo.py", "tokenization_elmo.py", "tokenizer.json"}
    assert files >= {"README.md", "results/pretraining.json", "tokenizer_config.json", "configuration_elmo.py"}
    assert files >= {"modules.json", "sentence_bert_config.json"}
    sent = "".join((tmp_path / "run" / file).read_text("utf-8", "ignore") for file in files)
    assert "a-token" not in sent and str(tmp_path) not in sent


def test_nothing_is_pushed_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordingHub, "calls", [])
    monkeypatch.setattr(publishing, "HfApi", RecordingHub)
    pretrain(tmp_path, **SHORT)
    assert not RecordingHub.calls


def test_help_and_code_agree_on_overrides():
    """The help shows an example, which must be one."""
    text = run_pretraining.ModelArguments.__dataclass_fields__["config_overrides"].metadata["help"]
    example = text[text.index("{") : text.rindex("}") + 1]
    ELMoConfig.from_preset("tiny", **json.loads(example))
