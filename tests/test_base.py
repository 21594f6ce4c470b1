"""Vocabularies of another size against the rows before; weights on disk against those in memory; checkpoints."""

import pytest
import torch
from bilm_models import make_batch, make_model, tiny_model
from head_models import check_weights_on_disk, fails

from modeling_elmo import ELMoForPreTraining, ELMoForTokenClassification, ELMoModel, ELMoTokenizer

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")


@pytest.mark.parametrize("cls", [ELMoModel, ELMoForTokenClassification])
def test_a_checkpoint_without_softmax_predicts_nothing(cls, tmp_path):
    make_model(cls).save_pretrained(tmp_path)
    model = ELMoForPreTraining.from_pretrained(tmp_path)
    batch = make_batch(model.config)
    fails("no softmax for probabilities", model, **batch, labels=batch["input_ids"])
    make_model(ELMoForPreTraining).save_pretrained(tmp_path)
    assert ELMoForPreTraining.from_pretrained(tmp_path).config.has_softmax
    sizes = {"vocab_size": 30, "ignore_mismatched_sizes": True}  # the softmax of the checkpoint does not fit
    assert not ELMoForPreTraining.from_pretrained(tmp_path, **sizes).config.has_softmax


@pytest.mark.parametrize("size", [6, 20])
def test_resizing_keeps_the_rows_that_remain(size):
    model = make_model(ELMoForPreTraining, word_embedding_size=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = model.resize_token_embeddings(size)
    assert model.config.vocab_size == model.elmo.config.vocab_size == size
    assert table.weight.shape == (size, 4) and model.softmax.bias.shape == (size,)
    for name, tensor in model.state_dict().items():
        kept = min(len(before[name]), len(tensor))
        assert torch.equal(tensor[:kept], before[name][:kept]), name
    batch = make_batch(model.config)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert model.resize_token_embeddings(pad_to_multiple_of=8).weight.shape[0] % 8 == 0
    fails("A vocabulary of 3 words has no room", model.resize_token_embeddings, 3)
    fails("a size of 8.0 and a multiple of 0", model.resize_token_embeddings, 8.0, 0)


@pytest.mark.parametrize("size", [7, 12, 40])
def test_resizing_changes_the_last_cluster_of_an_adaptive_softmax(size, tmp_path):
    """Compared with torch's module, built for the new size with the rows that remain and the mean of the cluster."""
    options = {"projection_size": 16, "softmax_type": "adaptive", "adaptive_cutoffs": [2, 5]}
    model = make_model(ELMoForPreTraining, **options).eval()
    rows, width = model.softmax.adaptive.tail[-1][1].weight.detach(), model.config.projection_size
    expected = torch.nn.AdaptiveLogSoftmaxWithLoss(width, size - 1, [2, 5], div_value=4.0, head_bias=True)
    changed = torch.cat([rows, rows.mean(0).expand(size, -1)])[: size - 1 - 5]
    expected.load_state_dict(model.softmax.adaptive.state_dict() | {"tail.1.1.weight": changed})
    model.resize_token_embeddings(size)
    hidden = torch.randn(3, width)
    found = model.softmax(hidden)
    assert found.shape == (3, size) and found[:, 0].isneginf().all()
    torch.testing.assert_close(found[:, 1:], expected.log_prob(hidden))
    batch = make_batch(model.config)
    loss = model(**batch, labels=batch["input_ids"]).loss
    model.save_pretrained(tmp_path)
    again = ELMoForPreTraining.from_pretrained(tmp_path)
    assert torch.equal(again.eval()(**batch, labels=batch["input_ids"]).loss, loss)
    bilm = ELMoModel.from_pretrained(tmp_path)
    bilm.resize_token_embeddings(5)  # it has no softmax whose clusters could be too large
    bilm.save_pretrained(tmp_path)
    assert ELMoModel.from_pretrained(tmp_path).config.vocab_size == 5


def test_other_clusters_of_an_adaptive_softmax_stay():
    options = {"projection_size": 16, "softmax_type": "adaptive", "adaptive_cutoffs": [2, 5]}
    model = make_model(ELMoForPreTraining, word_embedding_size=4, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = "only the words after the first 6 can change"
    fails(message, model.resize_token_embeddings, 6)
    for rows in ([0, 2, 1, *range(3, 12)], [0, 1, 2, 3, 4, 5, 6, 5], [0, 1, 2, 3, 4, -1, 6]):
        fails(message, model.replace_vocabulary, rows)
    assert model.elmo.word_embeddings.num_embeddings == model.config.vocab_size == 12  # nothing has changed
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.replace_vocabulary([0, 1, 2, 3, 4, 5, 9, -1, 7])
    rows = before["softmax.adaptive.tail.1.1.weight"]
    assert torch.equal(model.softmax.adaptive.tail[1][1].weight, torch.stack([rows[3], rows.mean(0), rows[1]]))


def test_new_words_are_random_as_the_present_ones():
    model = make_model(word_embedding_size=100, vocab_size=2004)
    before = model.word_embeddings.weight.detach().std()
    table = model.resize_token_embeddings(4000, mean_resizing=False)
    assert table.weight[2004:].std().item() == pytest.approx(before.item(), rel=0.05)


def test_a_cache_of_the_former_word_vectors_is_not_saved(tmp_path):
    tokenizer = ELMoTokenizer(vocab=["<PAD>", "<S>", "</S>", "<UNK>", "the"])
    model = tiny_model(word_embedding_size=4, vocab_size=5)
    model.cache_vocabulary(["the"], tokenizer, save=True)
    model.resize_token_embeddings(20)
    model.save_pretrained(tmp_path)
    assert model.vocabulary_cache is None and ELMoModel.from_pretrained(tmp_path).vocabulary_cache is None


def test_another_vocabulary_takes_the_rows_of_shared_words():
    model = make_model(ELMoForPreTraining, word_embedding_size=4)
    with torch.no_grad():
        model.softmax.bias.uniform_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [0, 1, 2, 3, -1, 9, 4, -1]
    model.replace_vocabulary(rows)
    assert model.config.vocab_size == 8
    for name in ("softmax.weight", "softmax.bias", "elmo.word_embeddings.weight"):
        expected = torch.stack([before[name].mean(0) if row < 0 else before[name][row] for row in rows])
        torch.testing.assert_close(model.state_dict()[name], expected)
    message = r"`source_rows` has \[8\]; pass 0 to 7"
    fails(message, model.replace_vocabulary, [0, 1, 2, 3, 8])
    unpublished = make_model(ELMoForPreTraining, has_softmax=False, vocab_size=4)
    unpublished.replace_vocabulary([0, 1, 2, 3, -1, -1])  # random rows; with the mean, all words would be equal
    assert not torch.equal(*unpublished.softmax.weight[-2:])


OFFLOADED = {
    "full": ("softmax", {}),
    "sampled": ("softmax", {"softmax_type": "sampled", "num_sampled": 3}),
    "adaptive": ("softmax", {"softmax_type": "adaptive", "projection_size": 16, "adaptive_cutoffs": [5]}),
    "encoder": ("elmo.char_encoder", {"word_embedding_size": 4}),
    "LSTM": ("elmo.forward_lstm", {}),
}


@pytest.mark.parametrize("part, options", OFFLOADED.values(), ids=OFFLOADED)
def test_parts_may_be_on_disk(part, options, tmp_path):
    model = make_model(ELMoForPreTraining, **options)
    batch = make_batch(model.config)

    def call(each):
        output = each(**batch, labels=batch["input_ids"], output_hidden_states=True)
        return [output.to_tuple(), each.score(**batch).to_tuple(), each.predict_words(**batch, top_k=3).to_tuple()]

    check_weights_on_disk(model, call, tmp_path, [part])
