"""The tagger against the CRF on the words alone, which `test_crf.py` compares with all label sequences."""

import pytest
import torch
import torch.nn.functional as F
from head_models import (
    NAMES,
    PAPER_NETWORKS,
    WORDS,
    batch_of,
    fails,
    make_batch,
    make_config,
    make_model,
    read_by,
    stirred,
    targets_of,
)
from torch.testing import assert_close

from modeling_elmo import ELMoForTokenClassification
from modeling_elmo.heads.crf import bio_constraints


def chain_of_words(emissions_BTK, batch, row):
    """The emissions of one row's words alone, and their mask."""
    words_T = batch["input_ids"][row] >= 4
    return emissions_BTK[row, words_T][None], torch.ones(1, int(words_T.sum()), dtype=torch.bool)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("names", [NAMES, ["O", "X", "I-X", "Y", "Z"]], ids=["bio", "free"])
def test_tagger_finds_the_best_chain_of_the_words(names, side):
    model = stirred(make_model(ELMoForTokenClassification, id2label=dict(enumerate(names))), std=0.7, seed=4)
    batch = make_batch(model.config, [*WORDS, 4, 4, 4], side=side)
    with torch.no_grad():
        emissions = model.train()(**batch)
        found = model.eval()(**batch)
    assert emissions.predictions is None and emissions.logits.shape == found.logits.shape
    shares = found.logits.softmax(-1)
    assert_close(found.logits.exp(), shares)  # already a distribution
    words = batch["input_ids"] >= 4
    assert (found.predictions[~words] == -100).all() and (found.predictions[words] >= 0).all()
    allowed = bio_constraints(tuple(names))
    assert (allowed is not None) == (names is NAMES)
    swaps = forbidden = 0
    for row, words_T in enumerate(words):
        chain = chain_of_words(emissions.logits, batch, row)
        best = model.crf.decode(*chain, allowed)[0][0]
        assert torch.equal(found.predictions[row, words_T], best)
        assert torch.equal(found.logits[row, words_T].argmax(-1), best)
        expected = model.crf.decode(*chain, allowed)[1][0].exp().detach()
        for table, label in zip(expected, best.tolist(), strict=True):
            likeliest = int(table.argmax())
            swaps += likeliest != label
            table[[label, likeliest]] = table[[likeliest, label]]
        assert_close(shares[row, words_T], expected, atol=1e-5, rtol=1e-4)
        forbidden += not torch.equal(model.crf.decode(*chain)[0][0], best)
    assert swaps and bool(forbidden) == (names is NAMES)  # the batch has cases of both


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_of_a_tagger_is_its_negative_log_likelihood(side):
    model = stirred(make_model(ELMoForTokenClassification, elmo_placement="both", scalar_mix_l2=0.3))
    batch = make_batch(model.config, side=side)
    words = batch["input_ids"] >= 4
    labels = targets_of(model, batch)["labels"]
    labels[0, words[0].nonzero()[1]] = -100  # a word of unknown label
    emissions, expected = model.train()(**batch).logits, 0.0
    for row, words_T in enumerate(words):
        chain, mask = chain_of_words(emissions, batch, row)
        expected -= model.crf.log_likelihood(chain, labels[row, words_T][None], mask).item() / len(words)
    expected += 0.3 * sum(mix.weights.square().sum().item() for mix in (model.input_mix, model.output_mix))
    for mode in (True, False):
        assert model.train(mode)(**batch, labels=labels).loss.item() == pytest.approx(expected, rel=1e-5)
    labels = labels.where(words, 3)  # labels at markers and padding are ignored
    assert model(**batch, labels=labels).loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_linear_tagger_divides_by_the_given_count():
    model = make_model(ELMoForTokenClassification, head="linear", scalar_mix_l2=0.5)
    with torch.no_grad():
        model.input_mix.weights.fill_(1.0)
    batch = make_batch(model.config, [6, 2, 4, 1])
    labels = targets_of(model, batch)["labels"]
    whole = model(**batch, labels=labels).loss
    count = (labels != -100).sum()
    halves = [
        model(**{k: v[rows] for k, v in batch.items()}, labels=labels[rows], num_items_in_batch=count).loss
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert_close(sum(halves), whole)
    output = model(**batch)
    assert output.predictions is None
    expected = F.cross_entropy(output.logits[labels != -100], labels[labels != -100]) + 0.5 * 3
    assert_close(whole, expected)
    for count in (None, torch.tensor(0), 7):  # without labels there is no loss
        loss = model(**batch, labels=torch.full_like(labels, -100), num_items_in_batch=count).loss
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        assert loss.item() == 0 and not any(gradient.any() for gradient in gradients)  # NaN would be true


def test_elmo_between_two_biLSTMs_of_a_tagger():
    """TagLM (Peters et al. 2017, equation 6): the top layer beside the output of the first biLSTM."""
    model = stirred(make_model(ELMoForTokenClassification, elmo_placement="between", scalar_mix_mode="top"))
    batch = batch_of(model, side="left")
    (words, texts, between), top = read_by(model, model.encoder, batch), model.elmo(**batch).hidden_states[-1]
    mask = batch["attention_mask"].bool()
    assert_close(between, texts.pack(model.between_mix.gamma.detach() * top[mask]))
    features = model.token_features(batch["character_ids"], batch["input_ids"], mask)
    assert_close(words, texts.pack(features))
    assert list(model.mixes()) == ["between"] and model.classifier.in_features == model.encoder.output_size
    for name, options in (("bcn", {}), ("tagger", {"task_num_layers": 1})):  # no such place
        cls, config = PAPER_NETWORKS[name][0], make_config(**options, elmo_placement="between")
        fails(f"elmo_placement='between' .*{cls.__name__}.*task_num_layers={config.task_num_layers}", cls, config)


BILOU, BMES = ["O", "B-X", "I-X", "L-X", "U-X"], ["O", "B-X", "M-X", "E-X", "S-X"]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (NAMES, None),
        (["LABEL_0", "LABEL_1"], None),
        (["NOUN", "VERB", "X"], None),
        (BILOU, "The labels 'L-X', 'U-X' are not BIO tags"),
        ([*BMES, "M-Y"], "The labels 'M-X', 'E-X', 'S-X' and 1 more are not BIO tags"),
    ],
)
def test_labels_that_the_pipeline_does_not_group_are_told_once_per_model(
    labels, told, tmp_path, warnings_of_transformers
):
    for number in range(2):
        model = make_model(ELMoForTokenClassification, id2label=dict(enumerate(labels)))
        assert len(warnings_of_transformers.messages) == number * bool(told)
        for _ in range(2):
            model.save_pretrained(tmp_path)
    messages = warnings_of_transformers.messages
    assert len(messages) == 2 * bool(told) and all(told in message for message in messages)
    ELMoForTokenClassification.from_pretrained(tmp_path)
    assert len(messages) == 2 * bool(told)


def test_errors_of_taggers():
    model = make_model(ELMoForTokenClassification)
    batch = make_batch(model.config)
    words = batch["input_ids"]
    nameless = {name: tensor for name, tensor in batch.items() if name != "input_ids"}
    fails("pass `input_ids`", model, **nameless)
    fails("`input_ids` has ids from 12 to 12, .* 0 to 11", model, **{**batch, "input_ids": words * 0 + 12})
    vectors = torch.zeros(*words.shape, 7)
    fails("`inputs_embeds` replace .* this head also reads words itself", model, inputs_embeds=vectors)
    model.config.id2label = {str(number): name for number, name in enumerate(NAMES)}
    fails("`config.id2label` is .*pass a name for each id from 0 to 4", model, **batch)
    bare = make_model(ELMoForTokenClassification, task_word_embedding_size=0, task_char_cnn_filters=[])
    fails("only they tell the markers <S> and </S> from words", bare, **nameless)
    assert (bare(inputs_embeds=vectors).predictions >= 0).all()  # all positions are words
    linear = make_model(ELMoForTokenClassification, head="linear")
    assert_close(linear(**nameless).logits, linear(**batch).logits)
    assert linear(inputs_embeds=vectors).logits.shape == (*words.shape, 5)
