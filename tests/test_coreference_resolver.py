"""Coreference resolution: what the network reads, gold mentions, clusters, saving, errors."""

import pytest
import torch
from bilm_models import seeded
from errors import refused
from head_models import check_weights_on_disk, fails, losses_of_spans, make_batch, make_model, read_by
from huggingface_hub.errors import StrictDataclassError
from torch.testing import assert_close
from transformers import AutoModelForTokenClassification

from modeling_elmo import ELMoConfig, ELMoForCoreferenceResolution, ELMoForTokenClassification, ELMoModel

SENTENCES = [4, 0, 1, 3, 7]  # words of each, between two markers
MENTIONS = torch.tensor([[0, 1, 2, 0], [0, 2, 2, 1], [2, 1, 1, 1], [3, 1, 3, 0], [4, 2, 2, 1], [4, 5, 5, 2]])


def make_resolver(**options):
    """Without dropout, and with random scores around 0."""
    model = make_model(ELMoForCoreferenceResolution, **{"lexical_dropout": 0.0, "num_labels": 2, **options})
    generator = seeded(1)
    with torch.no_grad():
        for parameter in model.ranker.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        given = {"speaker_ids": torch.zeros(5).long(), "genre_ids": torch.tensor(0)}
        model.ranker.mention_scorer.output.bias -= model(**document_of(model), **given).mention_scores.mean()
        scores = model(**document_of(model), **given).antecedent_scores[0, 1:].amax(1)
        model.ranker.pair_scorer.output.bias -= scores.median()
    return model


def document_of(model, **options):
    return make_batch(model.config, SENTENCES, **options)


NETWORKS = [{"use_speakers": True, "num_genres": 2}, {"train_singletons": True}]


@pytest.mark.parametrize("options", NETWORKS)
def test_weights_on_disk(options, tmp_path):
    model = make_resolver(**options)
    given = {"speaker_ids": torch.tensor([0, 1, 0, 1, 1]), "genre_ids": torch.tensor(1), "mentions": MENTIONS}
    check_weights_on_disk(model, lambda each: dict(each(**document_of(model), **given)), tmp_path)


@pytest.mark.parametrize("options", [{}, *NETWORKS])
@pytest.mark.parametrize("words", [SENTENCES, [3], [2], [1], [0, 0], []], ids=str)
def test_no_gradient_is_missing(options, words):
    """DistributedDataParallel waits for the gradient of each parameter, also without mentions, pairs or words."""
    model = make_resolver(**options).train()
    batch = make_batch(model.config, words or [1])
    batch = batch if words else {name: tensor[:0] for name, tensor in batch.items()}
    given = {"speaker_ids": torch.zeros(len(words)).long(), "genre_ids": torch.tensor(1)}
    for mentions in (MENTIONS[:0], torch.tensor([[0, 1, 1, 0]])[: sum(words)]):
        output = model(**batch, **given, mentions=mentions)
        kept = int(0.4 * sum(words))
        assert output.mention_scores.shape == (1, kept) and output.loss.isfinite()
        output.loss.backward()
        learned = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        missing = [name for name, grad in learned.items() if grad is None or not grad.isfinite().all()]
        assert not missing or not words
    assert model.eval()(**batch, **given).clusters.shape == (1, kept, 4)


# What the network reads


@pytest.mark.parametrize("placement", ["input", "output", "both", "no elmo", "no words"])
def test_states_read_elmo_and_head_words_do_not(placement):
    options = {"use_elmo": False} if placement == "no elmo" else {"elmo_placement": placement}
    if placement == "no words":
        options = {"task_word_embedding_size": 0, "task_char_cnn_filters": []}
    model = make_resolver(**options)
    batch = document_of(model)
    words = batch["input_ids"] >= 4
    states, heads, sentences, speakers, genre = read_by(model, model.ranker, batch)
    tokens, texts = read_by(model, model.encoder, batch)
    mask = batch["attention_mask"].bool()
    assert texts.lengths == words.sum(1).tolist() and speakers is None and genre is None
    assert sentences.tolist() == [0] * 4 + [2] + [3] * 3 + [4] * 7
    unpacked = [texts.unpack(each, int(mask.sum()))[words[mask]] for each in (model.encoder(tokens, texts), tokens)]
    expected = unpacked[:1]
    layers = None if placement == "no elmo" else model.elmo(**batch).hidden_states
    vectors = {place: mix(layers, mask)[words] for place, mix in model.mixes().items()}
    if "output" in vectors:
        expected.append(vectors["output"])
    assert_close(states, torch.cat(expected, -1))
    features = []
    if placement != "no words":
        features = [model.token_features(batch["character_ids"], batch["input_ids"], words)]
    assert_close(heads, features[0] if features else states)
    read = features + ([vectors["input"]] if "input" in vectors else [])
    assert_close(unpacked[1], torch.cat(read, -1))
    alone = {name: tensor[3:4] for name, tensor in batch.items()}  # a sentence does not depend on the others
    assert_close(read_by(model, model.ranker, alone)[0], states[5:8])
    if layers is not None:
        given = model(**batch, elmo_hidden_states=torch.stack(layers, 1))
        assert_close(given.antecedent_scores, model(**batch).antecedent_scores)


def test_padding_changes_nothing():
    model, found = make_resolver(train_singletons=True), []
    for side, extra in (("right", 0), ("right", 3), ("left", 3)):
        batch, mentions = document_of(model, side=side, extra=extra), MENTIONS.clone()
        first = batch["attention_mask"].argmax(1)  # positions count the padding on the left
        mentions[:, 1:3] += first[mentions[:, :1]]
        output = model(**batch, mentions=mentions)
        output.clusters[0, :, 1:3] -= first[output.clusters[0, :, :1]]
        found.append(dict(output))
    assert_close(found[1:], found[:1] * 2)


def test_markers_and_padding_belong_to_no_span():
    model = make_resolver(spans_per_word=10.0)
    batch = document_of(model)
    clusters = model(**batch).clusters
    expected = [
        [sentence, first, last]
        for sentence, words in enumerate(SENTENCES)
        for first in range(1, words + 1)
        for last in range(first, words + 1)
    ]
    found = clusters[0, :, :3].tolist()
    assert [span for span in expected if span in found] == found  # in document order
    assert [span for span in expected if span[1] == span[2]] == [span for span in found if span[1] == span[2]]


# Losses and clusters


@pytest.mark.parametrize("options", [{}, {"train_singletons": True}, {"max_span_width": 1}, {"scalar_mix_l2": 0.5}])
def test_the_loss_is_that_of_the_ranked_spans(options):
    """`test_spans.py` compares it with the formulas of the papers."""
    model = make_resolver(spans_per_word=1.0, **options)
    batch = document_of(model)
    ranked = []
    model.ranker.register_forward_hook(lambda _, given, spans: ranked.append(spans))
    for mentions in (MENTIONS, MENTIONS.flip(0).int(), MENTIONS[:0]):
        output = model(**batch, mentions=mentions)
        starts = torch.tensor([0, *SENTENCES]).cumsum(0)[mentions[:, 0]] - 1  # position 1 is a sentence's first word
        words = starts[:, None] + mentions[:, 1:3]
        gold = {tuple(span): cluster for span, cluster in zip(words.tolist(), mentions[:, 3].tolist(), strict=True)}
        marginal, mention = losses_of_spans(ranked[-1], gold)
        wanted = marginal + model.penalty() + (mention if model.config.train_singletons else 0)
        assert_close(output.loss, wanted)
        kept, gold = ({tuple(row[:3]) for row in rows.tolist()} for rows in (output.clusters[0], mentions))
        assert not gold or (kept & gold and gold - kept)  # also spans that are not reached


def test_outputs():
    model = make_resolver()
    batch = document_of(model)
    kept = int(0.4 * sum(SENTENCES))
    output = model(**batch, output_hidden_states=True)
    assert output.loss is None and len(output.hidden_states) == model.config.num_hidden_layers + 1
    shapes = {name: tuple(output[name].shape) for name in output if name != "hidden_states"}
    choices = {"antecedent_scores": (1, kept, kept), "antecedents": (1, kept, kept - 1)}
    assert shapes == {"clusters": (1, kept, 4), "mention_scores": (1, kept), **choices}
    gathered = output.keys() - {*model.config.keys_to_ignore_at_inference}
    assert gathered == {"clusters", "mention_scores"}
    assert model.train()(**batch).clusters is None
    assert isinstance(model(**batch, return_dict=False), tuple)


def test_singletons_are_mentions_with_a_positive_score():
    batch = document_of(make_resolver())
    without, found = (make_resolver(train_singletons=value)(**batch) for value in (False, True))
    assert_close(without.mention_scores, found.mention_scores)
    clusters, scores = found.clusters[0, :, 3], found.mention_scores[0]
    chains = without.clusters[0, :, 3]
    assert torch.equal(clusters >= 0, (chains >= 0) | (scores > 0))
    assert ((chains < 0) & (scores > 0)).any() and ((chains < 0) & (scores < 0)).any()
    seen = list(dict.fromkeys(clusters[clusters >= 0].tolist()))
    assert seen == list(range(len(seen)))  # counted in document order


def test_speakers_and_genres():
    model = make_resolver(use_speakers=True, num_genres=3)
    batch = document_of(model)
    by_sentence = torch.tensor([0, 9, 1, 0, 1])
    by_word = by_sentence[:, None].expand_as(batch["input_ids"]).masked_fill(batch["input_ids"] < 4, -7)
    genre = torch.tensor(2)
    one, other = (model(**batch, speaker_ids=ids, genre_ids=genre).antecedent_scores for ids in (by_sentence, by_word))
    assert_close(one, other)
    renamed = model(**batch, speaker_ids=7 - by_sentence, genre_ids=genre).antecedent_scores
    assert_close(one, renamed)
    for changed in ({"speaker_ids": 0 * by_sentence}, {"genre_ids": torch.tensor(1)}):
        given = {"speaker_ids": by_sentence, "genre_ids": genre, **changed}
        assert not torch.allclose(model(**batch, **given).antecedent_scores, one)


# Errors


def test_inputs_that_are_refused():
    model = make_resolver(use_speakers=True, num_genres=3)
    batch, speakers, genre = document_of(model), torch.tensor([0, 9, 1, 0, 1]), torch.tensor(2)
    # no such sentence; last before first; a marker; padding; outside; no cluster
    spoiled = [5, 1, 1, 0], [-1, 1, 1, 0], [0, 2, 1, 0], [0, 0, 1, 0], [2, 3, 3, 0], [0, 1, 99, 0], [0, 1, 1, -1]
    for shown, changes in (
        *((rf"`mentions` has \{row} in row 1", {"mentions": torch.tensor([[0, 2, 2, 0], row])}) for row in spoiled),
        (r"`mentions` has \[0, 2, 2, .* in row 1, .* twice", {"mentions": MENTIONS[[0, 1, 1]]}),
        (r"`mentions` has shape \(6, 3\); pass shape \(mentions, 4\)", {"mentions": MENTIONS[:, :3]}),
        ("`mentions` has dtype torch.float32", {"mentions": MENTIONS.float()}),
        ("pass `speaker_ids`", {"speaker_ids": None}),
        (r"`speaker_ids` has shape \(4,\); pass shape \(5\)", {"speaker_ids": speakers[1:]}),
        ("3 genres: pass `genre_ids`", {"genre_ids": None}),
        ("`genre_ids` has ids from 3 to 3, .*0 to 2", {"genre_ids": genre + 1}),
    ):
        fails(shown, model, **{**batch, "speaker_ids": speakers, "genre_ids": genre} | changes)
    for name, value in (("max_span_width", 0), ("spans_per_word", 0.0), ("lexical_dropout", 1.0), ("num_genres", -1)):
        with refused(f"`{name}` is {value}", StrictDataclassError):
            ELMoConfig(**{name: value})
    with refused("head is 'linear'"):
        make_resolver(head="linear")


# Training and saving


def test_every_parameter_but_the_bilm_s_is_trained():
    model = make_resolver(spans_per_word=1.0, use_speakers=True, num_genres=2).train()
    given = {"speaker_ids": torch.arange(5) % 2, "genre_ids": torch.tensor(1)}
    model(**document_of(model), **given, mentions=MENTIONS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith("elmo."), name
        assert not parameter.requires_grad or parameter.grad.any(), name


def test_dropout_as_published():
    """Lexical dropout at each position alone; the same dropped words at both places."""
    model = make_resolver(lexical_dropout=0.5).train()
    batch = document_of(model)
    model.eval()
    whole = read_by(model, model.ranker, batch)[1]
    model.train()
    seen = []
    for module in (model.encoder, model.ranker):
        module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    model(**batch)
    (tokens, texts), (_, heads, *_) = seen
    kept = heads != 0
    assert_close(heads, 2 * whole * kept)
    assert 0.2 < kept.float().mean() < 0.8 and not torch.equal(kept[0], kept[1])
    words, mask = batch["input_ids"] >= 4, batch["attention_mask"].bool()
    read = texts.unpack(tokens, int(mask.sum()))[words[mask]]
    assert torch.equal(read[:, : heads.shape[1]], heads)
    modules = ELMoForCoreferenceResolution(ELMoConfig(**SMALL)).named_modules()
    rates = {name: module.p for name, module in modules if hasattr(module, "p")}
    assert rates.pop("feature_dropout") == rates.pop("dropout") == 0.5 and {*rates.values()} == {0.2}


SMALL = {"char_cnn_filters": [[1, 4]], "lstm_hidden_size": 8, "projection_size": 4}


def test_defaults_of_the_paper():
    model = ELMoForCoreferenceResolution(ELMoConfig(**SMALL))
    assert (model.encoder.output_size, len(model.encoder.layers)) == (400, 1)
    assert {layer.out_features for layer in (model.ranker.mention_scorer.first, model.ranker.pair_scorer.second)} == {
        150
    }
    assert model.ranker.widths.weight.shape == model.ranker.distances.weight.shape == (10, 20)
    assert (model.ranker.max_antecedents, model.ranker.spans_per_word) == (250, 0.4)


def test_saving_and_loading(tmp_path):
    model = make_resolver(train_singletons=True)
    model.save_pretrained(tmp_path)
    batch = document_of(model)
    for auto_class in (ELMoForCoreferenceResolution, AutoModelForTokenClassification):
        loaded = auto_class.from_pretrained(tmp_path)
        assert type(loaded) is ELMoForCoreferenceResolution and loaded.config.train_singletons
        assert_close(loaded(**batch).antecedent_scores, model(**batch).antecedent_scores)
    reference = "modeling_elmo.ELMoForCoreferenceResolution"
    assert loaded.config.auto_map["AutoModelForTokenClassification"] == reference
    tagger = ELMoForTokenClassification(loaded.config)
    tagger.save_pretrained(tmp_path / "tagger")
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path / "tagger")
    assert type(tagger) is ELMoForTokenClassification
    assert tagger.config.auto_map["AutoModelForTokenClassification"].endswith(".ELMoForTokenClassification")


def test_a_head_on_a_bilm(tmp_path):
    ELMoModel(make_resolver().config).save_pretrained(tmp_path)
    model, info = ELMoForCoreferenceResolution.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(name.startswith("elmo.") for name in info["missing_keys"])
    assert not any(parameter.requires_grad for parameter in model.elmo.parameters())
