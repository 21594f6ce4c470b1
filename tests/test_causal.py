"""The causal language model: its logits and loss against `score` and the loss of both directions, and stock calls."""

import re

import pytest
import torch
from bilm_models import make_tokenizer, save, tiny_model
from errors import refused
from places import ROOT
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForPreTraining, AutoTokenizer

from modeling_elmo import ELMoConfig, ELMoForCausalLM, ELMoForPreTraining
from modeling_elmo.kernels.int8 import int8_obstacle
from modeling_elmo.prediction import score_texts

WORDS = ["the", "cat", "sat", "on", "mat", "."]
TEXTS = ["the cat sat on the mat .", "the dog", "sat on the cat", ""]


@pytest.fixture(scope="module", params=["full", "sampled", "adaptive"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = make_tokenizer(*WORDS, pre_tokenization="whitespace")
    options = {"softmax_type": request.param, "num_sampled": 3, "vocab_size": len(tokenizer), "adaptive_cutoffs": [4]}
    return save(folder, tiny_model(ELMoForPreTraining, **options), tokenizer)


def batch_of(folder, side="right", texts=TEXTS):
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    return inputs, inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_are_the_forward_log_probabilities(folder, side):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is ELMoForCausalLM and not model.training
    inputs, labels = batch_of(folder, side)
    with torch.no_grad():
        output, scores = model(**inputs, labels=labels, output_hidden_states=True), model.score(**inputs)
    mask = inputs["attention_mask"].bool()
    found = output.logits[:, :-1].gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
    pairs = mask[:, 1:] & mask[:, :-1]
    assert_close(found[pairs], scores.forward_log_probs[:, 1:][pairs])
    assert_close(output.loss, -scores.forward_log_probs.sum() / pairs.sum())
    shares = output.logits.exp()
    assert_close(shares[mask].sum(-1), torch.ones(int(mask.sum())))
    assert not shares[mask][:, 0].any() and not output.logits[~mask].any()  # <PAD>; padding
    last = model(**inputs, logits_to_keep=2).logits
    assert_close(last, output.logits[:, -2:])
    for wrong in (-1, torch.tensor([0, 1])):
        with refused("`logits_to_keep` is .*; pass a number of positions, 0 for all"):
            model(**inputs, logits_to_keep=wrong)
    both = ELMoForPreTraining.from_pretrained(folder)(**inputs, labels=labels, output_hidden_states=True)
    assert_close(output.loss, both.forward_loss)
    for mine, layer in zip(output.hidden_states, both.hidden_states, strict=True):
        assert_close(mine, layer.chunk(2, -1)[0])


def test_training_without_labels_is_told(folder, warnings_of_transformers):
    """Once for each model."""
    for number in range(2):
        model, (inputs, labels) = AutoModelForCausalLM.from_pretrained(folder).train(), batch_of(folder)
        model(**inputs, labels=labels)
        model.eval()(**inputs)
        assert len(warnings_of_transformers.messages) == number
        model.train()(**inputs)
        model(**inputs)
        message = warnings_of_transformers.messages[number]
        assert "receives no `labels` in training. A loss of your own must shift the labels" in message
        assert "Trainer" not in message


def test_training_has_the_gradients_of_the_forward_direction(folder):
    """Those of the joint loss, twice: it is the mean of both directions. The backward direction is frozen."""
    inputs, labels = batch_of(folder)
    causal, joint = (cls.from_pretrained(folder).train() for cls in (ELMoForCausalLM, ELMoForPreTraining))
    for model in (causal, joint):
        model.softmax.softmax_type = "full" if model.config.softmax_type == "sampled" else model.softmax.softmax_type
    output = causal(**inputs, labels=labels)
    assert output.logits is None
    (3 * output.loss).backward()
    joint.elmo.token_projection.requires_grad_(False)
    (2 * 3 * joint(**inputs, labels=labels).loss).backward()
    for (name, mine), (_, theirs) in zip(
        causal.elmo.forward_lstm.named_parameters(), joint.elmo.forward_lstm.named_parameters(), strict=True
    ):
        assert_close(mine.grad, theirs.grad, msg=name)
    assert all(parameter.grad is None for parameter in causal.elmo.backward_lstm.parameters())
    new = ELMoForCausalLM(causal.config)
    frozen = {name for name, parameter in new.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name in new.state_dict() if "backward_lstm" in name}
    assert causal(**inputs).logits.requires_grad  # for losses of one's own


def test_losses_of_float64_are_exact(folder):
    inputs, labels = batch_of(folder)
    with torch.no_grad():
        for cls in (ELMoForCausalLM, ELMoForPreTraining):
            model = cls.from_pretrained(folder, dtype=torch.float64)
            scores = model.score(**inputs)
            count = (labels[:, 1:] != -100).sum()
            ways = [-log_probs.sum() / count for log_probs in (scores.forward_log_probs, scores.backward_log_probs)]
            expected = ways[0] if cls is ELMoForCausalLM else sum(ways) / 2
            assert model(**inputs, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_what_it_cannot_do(folder, tmp_path):
    model = ELMoForCausalLM.from_pretrained(folder)
    inputs, _ = batch_of(folder)
    with refused("does not generate text; `predict_words`", NotImplementedError):
        model.generate(**inputs)
    config = ELMoConfig.from_preset("tiny", vocab_size=9, has_softmax=False)
    with refused("has no softmax for probabilities"):
        ELMoForCausalLM(config).eval()(**inputs)


def test_eight_bits(folder):
    model = ELMoForCausalLM.from_pretrained(folder)
    inputs, labels = batch_of(folder)
    with torch.no_grad():
        exact = float(model(**inputs, labels=labels).loss)
        rounded = float(model.quantize()(**inputs, labels=labels).loss)
    assert rounded == pytest.approx(exact, rel=0.02) and (rounded != exact) == (int8_obstacle() is None)


@pytest.mark.parametrize("library", ["minicons", "surprisal"])
def test_libraries_find_the_surprisals_of_score_texts(folder, library):
    """In a padded batch, with the code of docs/analysis.md."""
    pytest.importorskip(library)
    page = ROOT / "docs" / "analysis.md"
    code = next(
        block for block in re.findall("```py\n(.*?)```", page.read_text(), re.DOTALL) if f"from {library}" in block
    )
    names = {"name": str(folder), "texts": TEXTS, "AutoModelForPreTraining": AutoModelForPreTraining}
    exec(code, names)
    if library == "minicons":
        found = names["scores"]
    else:
        found = [[*row][: len(text.split()) + 2] for row, text in zip(names["surprisals"], TEXTS, strict=True)]
    model, tokenizer = AutoModelForPreTraining.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for mine, theirs in zip(score_texts(model, tokenizer, TEXTS), found, strict=True):
        words = tokenizer.convert_ids_to_tokens(tokenizer.convert_tokens_to_ids([word.word for word in mine]))
        assert [word for word, _ in theirs] == words
        assert [float(surprisal) for _, surprisal in theirs] == pytest.approx(
            [-(word.forward or 0) for word in mine], abs=1e-5
        )
