"""The coreference pipeline against the model itself, with plain loops from spans to characters."""

import itertools
import re
import sys
import unicodedata
from types import SimpleNamespace

import datasets
import pytest
import torch
from bilm_models import save, seeded
from errors import refused
from head_models import make_coreference_pipeline
from transformers import pipeline

from modeling_elmo.heads.coreference_pipeline import ELMoCoreferencePipeline, split_sentences, windows_of

SENTENCES = [
    "Ada Lovelace wrote it in 1843.",
    "She (Ada) knew Mr. Babbage.",
    "He built  no engine;",
    "Naïve, 밥 says she.",
]
WORDS = [["Ada", "wrote", "it"], ["She", "met", "the", "man", "in", "London"], ["He", "did", "not", "."]]


@pytest.fixture(scope="module", params=["right", "left"])
def pipe(request):
    return make_coreference_pipeline(request.param)


def spans_by_cluster(pipe, sentences, are_words) -> list[list[tuple[int, int, int]]]:
    """The clusters of the model's own output; spans count words of a sentence."""
    inputs = pipe.tokenizer(
        sentences, is_split_into_words=are_words, padding=True, padding_side="right", return_tensors="pt"
    )
    with torch.no_grad():
        rows = pipe.model(**inputs).clusters[0].tolist()
    found = [[(s, a - 1, b - 1) for s, a, b, number in rows if number == cluster] for cluster in range(len(rows))]
    return [cluster for cluster in found if cluster]


def characters_of(spans, starts) -> list[list[tuple[int, int]]]:
    """`starts[sentence][word]` are the characters of a word."""
    return [[(starts[s][a][0], starts[s][b][1]) for s, a, b in cluster] for cluster in spans]


def shown(found) -> list[list[tuple[int, int]]]:
    return [[(mention["start"], mention["end"]) for mention in cluster] for cluster in found["clusters"]]


@pytest.mark.parametrize("sentences", [SENTENCES, WORDS], ids=["texts", "words"])
def test_words_are_joined_by_spaces_and_sentences_by_line_feeds(pipe, sentences):
    are_words = sentences is WORDS
    lines = [" ".join(each) for each in sentences] if are_words else sentences
    text, starts, position = "\n".join(lines), [], 0
    for sentence, line in zip(sentences, lines, strict=True):
        words, end = sentence if are_words else pipe.tokenizer.splitter.words(sentence), position
        starts.append([])
        for word in words:
            end = text.index(word, end) + len(word)
            starts[-1].append((end - len(word), end))
        position += len(line) + 1
    found = pipe(sentences)
    assert shown(found) == characters_of(spans_by_cluster(pipe, sentences, are_words), starts)
    assert len(found["clusters"]) > 1 and max(map(len, found["clusters"])) > 1
    for mention in itertools.chain.from_iterable(found["clusters"]):
        assert mention["text"] == text[mention["start"] : mention["end"]]


def test_sentences_without_words_change_nothing_but_positions(pipe):
    plain = shown(pipe(SENTENCES))
    pipe.model.train()
    assert shown(pipe(["", *SENTENCES, " \n"])) == [[(a + 1, b + 1) for a, b in cluster] for cluster in plain]


def test_singletons_are_left_out(pipe):
    every, without = pipe(SENTENCES)["clusters"], pipe(SENTENCES, singletons=False)["clusters"]
    assert without == [cluster for cluster in every if len(cluster) > 1] and 0 < len(without) < len(every)
    untrained = make_coreference_pipeline(train_singletons=False)
    assert all(len(cluster) > 1 for cluster in untrained(SENTENCES)["clusters"])
    with refused("`singletons` is True"):
        untrained(SENTENCES, singletons=True)


def test_a_short_document_has_one_span_or_none():
    """A single kept span has no antecedents to choose from."""
    one = make_coreference_pipeline()
    with torch.no_grad():
        one.model.ranker.mention_scorer.output.bias += 100.0
    (cluster,) = one([["Ada", "wrote", "it", "."]])["clusters"]
    assert len(cluster) == 1 and one([["Ada", "wrote", "it", "."]], singletons=False) == {"clusters": []}
    assert one([["Ada"]]) == {"clusters": []}


def test_several_documents(pipe, check_streams):
    documents = [SENTENCES, WORDS, SENTENCES[1:]] * 3
    expected = [pipe(document) for document in documents]
    check_streams(pipe, documents, expected)
    given = {"model": pipe.model, "tokenizer": pipe.tokenizer}
    for batched, options in ((ELMoCoreferencePipeline(**given, batch_size=8), {}), (pipe, {"batch_size": 2})):
        assert list(batched(iter(documents), **options)) == expected and batched(WORDS, **options) == expected[1]
    rows = datasets.Dataset.from_dict({"document": [SENTENCES, SENTENCES[1:]]})
    assert pipe(rows) == pipe(rows["document"]) == expected[:3:2]


def test_genres_and_speakers():
    options = {"use_speakers": True, "num_genres": 2, "num_labels": 2, "id2label": {0: "bc", 1: "nw"}}
    pipe = make_coreference_pipeline(**options, label2id={"bc": 0, "nw": 1})
    with torch.no_grad():
        pipe.model.ranker.genres.weight.normal_(std=9.0)
    assert pipe(SENTENCES) == pipe(SENTENCES, genre="bc") != pipe(SENTENCES, genre="nw")
    with refused("`genre` is 'tc'; .*bc, nw"):
        pipe(SENTENCES, genre="tc")
    expected = [pipe(SENTENCES, genre=genre) for genre in ("bc", "nw")]
    pipe.model.config.id2label = {0: "nw", 1: "bc"}  # alone, as `from_pretrained(folder, id2label=...)` sets it
    for pipe.model.config.label2id in (None, {"bc": 0, "nw": 1}):
        assert [pipe(SENTENCES, genre=genre) for genre in ("nw", "bc")] == expected
    pipe.model.config.return_dict = False
    assert [pipe(SENTENCES, genre=genre) for genre in ("nw", "bc")] == expected


# Windows


def plain_windows(lengths, max_words) -> list[tuple[int, int, int]]:
    found, begin = [], 0
    while begin < len(lengths):
        first = begin
        while first and sum(lengths[first - 1 : begin]) <= max_words // 4:
            if sum(lengths[first - 1 : begin + 1]) > max_words:
                break
            first -= 1
        end = begin + 1
        while end < len(lengths) and sum(lengths[first : end + 1]) <= max_words:
            end += 1
        found.append((first, begin, end))
        begin = end
    return found


@pytest.mark.parametrize("max_words", [1, 3, 7, 10, 40, 1000])
def test_windows_equal_plain_loops(max_words):
    generator = seeded(max_words)
    for count in (1, 2, 9, 30):
        lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
        windows = list(windows_of(lengths, max_words))
        assert windows == plain_windows(lengths, max_words)
        assert [number for _, begin, end in windows for number in range(begin, end)] == list(range(count))
        for first, begin, end in windows:
            assert sum(lengths[first:end]) <= max_words or (first, end) == (begin, begin + 1)
            assert sum(lengths[first:begin]) <= max_words // 4


def test_windows_find_what_the_whole_document_has():
    """All spans are kept, and their antecedents are near: then nothing depends on the rest of the document."""
    pipe = make_coreference_pipeline(max_span_width=1, spans_per_word=1.0, max_antecedents=5, shift=0.0)
    with torch.no_grad():
        for parameter in pipe.model.ranker.parameters():
            parameter.normal_(std=0.3)
    sentences = [[word + str(number % 3) for word in words] for number in range(40) for words in WORDS]
    whole = pipe(sentences)
    assert len(whole["clusters"]) > 10 and max(map(len, whole["clusters"])) > 20
    forward, sizes = pipe.model.forward, []

    def noted(**inputs):
        sizes.append(int(inputs["attention_mask"].sum()) - 2 * len(inputs["attention_mask"]))
        return forward(**inputs)

    pipe.model.forward = noted
    windows = pipe(sentences, max_words=60)
    assert windows == whole
    assert len(sizes) > 8 and max(sizes) <= 60  # memory does not grow with the document


# Raw text


def test_sentencex_splits_text(pipe):
    pytest.importorskip("sentencex")
    text = "Dr. Ada wrote it at 5 p.m. in London\ud800!  She (밥) knew him.\n\nHe built no engine."
    starts = [0, text.index("She"), text.index("He built")]
    sentences = [text[a:b].strip() for a, b in itertools.pairwise([*starts, len(text)])]
    given, found = pipe(sentences), pipe(text, language="en")
    texts = [[mention["text"] for mention in cluster] for cluster in given["clusters"]]
    assert [[mention["text"] for mention in cluster] for cluster in found["clusters"]] == texts
    assert all(each["text"] == text[each["start"] : each["end"]] for cluster in found["clusters"] for each in cluster)


def test_letters_in_parts_have_the_clusters_of_composed_ones():
    """Also their sentences: an abbreviation with an accent does not end one."""
    pytest.importorskip("sentencex")
    pipe = make_coreference_pipeline(plain_signs=True)
    text = "Émile ve el núm. 5 del café-bar/théâtre.  Él no está en la pág. 7. Zoë lo vio; Émile no."
    apart = unicodedata.normalize("NFD", text)
    ends = [apart.index("E\u0301l"), apart.index("Zoe"), len(apart)]
    assert split_sentences(apart, "es") == list(itertools.pairwise([0, *ends]))
    found, expected = (pipe(each, language="es")["clusters"] for each in (apart, text))
    assert len(expected) > 1
    for cluster, expected_cluster in zip(found, expected, strict=True):
        assert all(each["text"] == apart[each["start"] : each["end"]] for each in cluster)
        texts = [unicodedata.normalize("NFC", each["text"]) for each in cluster]
        assert texts == [each["text"] for each in expected_cluster]


def test_a_missing_splitter_is_told(pipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with refused("pip install sentencex", ImportError):
        pipe("Ada wrote it. She published it.")


@pytest.mark.parametrize("document", [[], {"text": "a"}, [["a"], "b"], [["a"], []], [["a", ""]]])
def test_documents_that_are_refused(document, pipe):
    with refused(re.escape(f"The document is {document!r}; pass a text, ")):
        pipe(document)


def test_documents_without_words(pipe, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "sentencex", SimpleNamespace(get_sentence_boundaries=lambda language, text: {"xx": []}[language])
    )
    for document, text in ((["", "  "], r"'\\n  '"), ("", "''")):
        with refused(f"The document {text} has no words"):
            pipe(document, language="xx")


@pytest.mark.parametrize(
    "options, shown",
    [
        ({"max_seq_len": 12}, "max_seq_len"),
        ({"max_words": 2.5}, "`max_words` is 2.5.*at least 1"),
        ({"genre": "bc"}, "`genre` is 'bc'; .*no genres"),
    ],
)
def test_options_that_are_refused(pipe, options, shown):
    with refused(shown, (TypeError, ValueError)):
        pipe(SENTENCES, **options)


# Folders


@pytest.mark.parametrize("pipe", ["right"], indirect=True)
def test_a_folder_brings_its_pipeline(pipe, tmp_path):
    given = pipe
    for folder in (tmp_path / "0", tmp_path / "1"):
        save(folder, given.model, given.tokenizer)
        given = pipeline("coreference-resolution", model=str(folder), trust_remote_code=True)
        assert type(given).__module__.startswith("transformers_modules") and given(SENTENCES) == pipe(SENTENCES)
    registered = pipeline("coreference-resolution", model=pipe.model, tokenizer=pipe.tokenizer)
    assert isinstance(registered, ELMoCoreferencePipeline) and registered(SENTENCES) == pipe(SENTENCES)
