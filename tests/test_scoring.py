"""Scores and predictions of words against log-probabilities of a plain float64 biLM; errors."""

import numpy as np
import pytest
import torch
from bilm_models import LENGTHS, make_batch, make_model
from head_models import fails
from numpy.testing import assert_allclose
from plain_elmo import PlainELMo

from modeling_elmo import ELMoForPreTraining

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")


def plain_log_probs(model, batch, row):
    """Log-probabilities `(2, time, classes)` of both directions for one row's tokens in float64, without <PAD>.

    They are 0 at positions that a direction does not predict.
    """
    plain = PlainELMo(model.elmo.state_dict(), model.config)
    weight, bias = model.softmax.weight.detach().double().numpy(), model.softmax.bias.detach().double().numpy()
    top = plain(batch["character_ids"][row][batch["attention_mask"][row].bool()].numpy())[-1]
    forward, backward = np.split(top, 2, axis=1)
    found = np.zeros((2, len(top), len(weight) - 1))
    for position in range(len(top)):
        for direction, source in ((0, position - 1), (1, position + 1)):
            if 0 <= source < len(top):
                logits = (weight @ (backward if direction else forward)[source] + bias)[1:]
                found[direction, position] = logits - np.log(np.exp(logits).sum())
    return found


@pytest.mark.parametrize("side", ["right", "left"])
def test_scores_are_log_probabilities_and_the_loss_is_their_mean(side):
    model = make_model(ELMoForPreTraining)
    with torch.no_grad():
        model.softmax.bias.uniform_(-1, 1)
    batch = make_batch(model.config, side=side)
    expected = np.zeros((2, *batch["input_ids"].shape))
    for row, real in enumerate(batch["attention_mask"].bool()):
        targets = batch["input_ids"][row, real] - 1  # without <PAD>
        expected[:, row, real] = plain_log_probs(model, batch, row)[:, range(len(targets)), targets]
    scores = model.score(**batch)
    assert_allclose(scores.forward_log_probs, expected[0], atol=1e-6)
    assert_allclose(scores.backward_log_probs, expected[1], atol=1e-6)

    labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
    labels[0, 2] = -100
    expected *= (labels != -100).numpy()
    forward, backward = (-each.sum() / np.count_nonzero(each) for each in expected)
    output = model(**batch, labels=labels)
    assert not output.forward_loss.requires_grad and not output.backward_loss.requires_grad
    assert output.forward_loss.item() == pytest.approx(forward, abs=1e-6)
    assert output.backward_loss.item() == pytest.approx(backward, abs=1e-6)
    assert output.loss.item() == pytest.approx((forward + backward) / 2, abs=1e-6)
    counted = model(**batch, labels=labels, num_items_in_batch=10)
    assert counted.loss.item() == pytest.approx(-expected.sum() / 20, abs=1e-6)
    assert torch.equal(model(**batch, labels=labels.to(torch.int8)).loss, output.loss)


@pytest.mark.parametrize("direction, chunk", [("forward", 1000), ("backward", 1), ("both", 1)])
def test_predicted_words_are_the_likeliest(direction, chunk, monkeypatch):
    monkeypatch.setattr("modeling_elmo.scoring.CHUNK_LOGITS", chunk)
    model = make_model(ELMoForPreTraining)
    batch = make_batch(model.config)
    found = model.predict_words(**batch, top_k=4, direction=direction)
    for row, length in enumerate(LENGTHS):
        log_probs = plain_log_probs(model, batch, row)
        log_probs = log_probs.sum(0) if direction == "both" else log_probs[int(direction == "backward")]
        for position in range(found.word_ids.shape[1]):
            word_ids, values = found.word_ids[row, position], found.log_probs[row, position]
            if position >= length or not log_probs[position].any():
                assert not word_ids.any() and not values.any()
                continue
            expected = log_probs[position] - np.log(np.exp(log_probs[position]).sum())
            assert word_ids.tolist() == (np.argsort(-expected)[:4] + 1).tolist()
            assert_allclose(values, np.sort(expected)[::-1][:4], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_predicting_and_scoring_in_other_dtypes(dtype):
    model = make_model(ELMoForPreTraining)
    batch = make_batch(model.config)
    expected, scores = model.predict_words(**batch), model.score(**batch)
    found, found_scores = model.to(dtype).predict_words(**batch), model.score(**batch)
    atol = 0.1 if dtype == torch.bfloat16 else 1e-5
    assert_allclose(found.log_probs, expected.log_probs, atol=atol)
    assert_allclose(found_scores.forward_log_probs, scores.forward_log_probs, atol=atol)
    cells = model(**batch).final_states[1]
    assert cells.dtype == torch.promote_types(dtype, torch.float32)  # never in half precision


def test_errors_of_the_language_model():
    model = make_model(ELMoForPreTraining, has_softmax=False)
    batch = make_batch(model.config)
    words = batch["input_ids"]
    assert model(**batch).loss is None
    for call in (model.score, lambda **batch: model(**batch, labels=words)):
        fails("no softmax for probabilities", call, **batch)
    model.train()
    assert model(**batch, labels=words).loss.isfinite() and model.config.has_softmax
    fails("labels` are shifted inside", model, **batch, labels=words, forward_targets=words)
    fails("Received `forward_targets` alone", model, **batch, forward_targets=words)
    fails(
        "only special words.* --vocabulary_size NUMBER, and for a checkpoint --vocabulary replace",
        make_model(ELMoForPreTraining, vocab_size=4),
        **batch,
        labels=words,
    )
    fails("`labels` has dtype torch.bool", model, **batch, labels=words.bool())
    fails(r"`labels` has shape \(3, 2\); pass shape \(3, 6\)", model, **batch, labels=words[:, :2])
    fails("ids from 12 to 12", model, **batch, labels=torch.full_like(words, 12))
    fails("`labels` has <PAD> at a word", model, **batch, labels=torch.zeros_like(words))
    fails(r"call `model.eval\(\)` first", model.predict_words, **batch)
    model.eval()
    fails("`direction` is 'left'", model.predict_words, **batch, direction="left")
    fails("`top_k` is 12; pass 1 to 11", model.predict_words, **batch, top_k=12)
    fails("pass `input_ids` with `character_ids`", model.score, batch["character_ids"])
