"""The benchmark of a training step measures the step that training takes."""

import json

import pytest
import torch

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts import benchmark_pretraining
from modeling_elmo.run_scripts.benchmark_pretraining import PARTS, main, timed_step
from modeling_elmo.run_scripts.pretraining.batches import SentenceBatches
from modeling_elmo.run_scripts.pretraining.corpus import Corpus


def test_figures_of_every_variant(tmp_path, capsys):
    sizes = ["--preset", "tiny", "--vocabulary_size", "2000", "--num_sampled", "50", "--num_batches", "2"]
    options = [*sizes, "--per_device_train_batch_tokens", "256", "--output", str(tmp_path / "figures.json")]
    rows = main([*options, "--softmaxes", "full", "sampled", "sampled-dense", "adaptive"])
    assert [row["variant"] for row in rows] == ["full", "sampled", "sampled-dense", "adaptive"]
    assert json.loads((tmp_path / "figures.json").read_text()) == rows
    for row in rows:
        assert all(row[part] > 0 for part in PARTS) and row["fastest"] <= row["step"] <= row["slowest"]
    assert len(capsys.readouterr().out.splitlines()) == 6
    with pytest.raises(ValueError, match="--softmaxes flat: pass some of full, sampled"):
        main([*options, "--softmaxes", "flat"])


def test_parts_give_the_gradients_of_the_whole(tmp_path, monkeypatch):
    """With the true targets, for once: those of the benchmark stand elsewhere."""
    (tmp_path / "text.txt").write_text("a b c\nb c\na a b d e\n")
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", *"abcd"], pre_tokenization="whitespace")
    torch.manual_seed(0)
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), dropout=0.0)).train()
    corpus = Corpus.from_files([str(tmp_path / "text.txt")])
    batch = next(iter(SentenceBatches(corpus, tokenizer, 100, is_split_into_words=True)))
    targets = batch.inputs["labels"].clamp(min=1)
    whole = model(
        **{name: tensor for name, tensor in batch.inputs.items() if name != "labels"},
        forward_targets=targets,
        backward_targets=targets,
    )
    whole.loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(benchmark_pretraining, "clip_gradients", lambda *_: None)
    timed_step(model, [], batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-7, msg=name)
