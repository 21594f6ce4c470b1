"""Damaged texts, vocabularies, tokenizer files, calls and batches: a clean error or the right answer.

An error is clean if a program prints it in one line, and if it names the file. Where an answer has a short definition,
it is compared with it.
"""

import gzip
import json
import re
import zlib

import pytest
import torch
import zstandard
from head_models import HEADS, batch_of, make_batch, make_config, make_model, targets_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modeling_elmo import ELMoForCoreferenceResolution, ELMoForPreTraining, ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import conll_documents, document_row
from modeling_elmo.run_scripts.fine_tuning.tasks.semantic_roles import ROLE_FEATURES, checked_row, role_rows
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user
from modeling_elmo.run_scripts.program.data_files import column_rows, json_rows, numbered_texts, table_rows
from modeling_elmo.run_scripts.program.texts import numbered_lines
from modeling_elmo.run_scripts.vectors.word_vectors import read_word_vectors

SPECIAL = ["<PAD>", "<S>", "</S>", "<UNK>"]
WORDS = ["the", "of", "London", "밥", "a\u0301", "\U0001f600", "don't", "x" * 60]
VALUES = [None, True, 0, -1, 3, 2.5, 10**9, 2**70, "", "x", "9" * 5000, [], [3], ["a"], {}, {"a": 1}, {"a": {}}]
REFUSED = object()  # of an input without an answer

fuzz = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def answer_of(function, *args, source=""):
    """What a function of ours returns, or `REFUSED` after an error with `source` in its message."""
    try:
        return function(*args)
    except Exception as error:
        clean = is_mistake_of_user(error) or isinstance(error, TypeError) and re.search("pass |must be", str(error))
        assert clean and source in str(error) and len(str(error)) > 20, repr(error)
        return REFUSED


@st.composite
def damaged(draw, data):
    """The data after up to two accidents: bytes are cut off, lost, repeated, replaced or inserted."""
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.sampled_from([start, start + 1, start + 8, start + 100, len(data)]))
        inserts = [b"", b"\n", b"\r\n", b"\xff", b"[" * 5000, bytes(8), data[start:end] * 2]
        data = data[:start] + draw(st.sampled_from(inserts) | st.binary(max_size=8)) + data[end:]
    return data


@st.composite
def changed(draw, content):
    """JSON content with one value replaced or removed, at any depth."""
    part = content = json.loads(json.dumps(content))
    while True:
        key = draw(st.sampled_from(list(part) if isinstance(part, dict) else range(len(part))))
        if not (isinstance(part[key], (dict, list)) and part[key] and draw(st.booleans())):
            break
        part = part[key]
    if draw(st.integers(0, 4)):
        part[key] = draw(st.sampled_from(VALUES))
    else:
        del part[key]
    return content


# Texts


def lines_of(data, suffix):
    """The lines by definition: of the whole content at once."""
    try:
        if suffix and not data:
            return REFUSED
        content, packed = (gzip.decompress(data), b"") if suffix == ".gz" else (b"" if suffix else data, data)
        while suffix == ".zst" and packed:
            frame = zstandard.ZstdDecompressor().decompressobj()
            content += frame.decompress(packed)
            if not frame.eof:
                return REFUSED
            packed = frame.unused_data
        text = content.decode("utf-8-sig")
        lines = text.split("\n" if "\n" in text else "\r")
    except (EOFError, OSError, zlib.error, zstandard.ZstdError, UnicodeDecodeError):
        return REFUSED
    if "\0" in text:
        return REFUSED
    return [(number, line.rstrip("\r")) for number, line in enumerate(lines if lines[-1] else lines[:-1], 1)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines(tmp_path, suffix):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    text, path = (
        "\n".join(f"{word} {number}" for number, word in enumerate(WORDS * 4)).encode(),
        tmp_path / f"a{suffix}",
    )

    @fuzz
    @given(damaged(text).map(pack) | damaged(pack(text)))
    def check(data):
        path.write_bytes(data)
        found = answer_of(lambda: list(numbered_lines(path)), source=str(path))
        assert found == lines_of(data, suffix)

    check()


PROPBANK = "x\t0\tIt\tPRP\t-\t-\t(A1*)\nx\t1\tran\tVBD\trun\trun.01\t(V*)\n\n"
CONLL2012 = "d 0 0 It PRP (S* - - - A * (A1*) -\nd 0 1 ran VBD *) run 01 1 A * (V*) -\n\n"
READERS = {
    "a.conll": ("EU\tB-ORG\nrejects\tO\n\n", lambda path: column_rows(path, "tokens", None, None, [])),
    "a.conllu": ("1\t밥\t_\tNOUN\t_\n2-3\tx\t_\t_\t_\n\n", lambda path: column_rows(path, "t", None, None, [])),
    "a.tsv": ("text\tlabel\na b\tx\n밥\ty\nc\tx\n", lambda path: table_rows(path, [])),
    "a.csv": ('text,label\n"a\nb",x\n밥,y\nc,x\n', lambda path: table_rows(path, [])),
    "text.conll": ("EU B-ORG\nrejects O\n\n", lambda path: numbered_texts(path, "text")),
    "text.tsv": ("text\tlabel\na b\tx\n밥\ty\n", lambda path: numbered_texts(path, "text")),
    "text.jsonl": ('{"text": "a b"}\n{"text": "밥"}\n', lambda path: numbered_texts(path, "text")),
    "a.json": (json.dumps({"data": [{"a": "밥"}] * 5}, ensure_ascii=False), json_rows),
    "a.jsonl": ('{"a": "\\ud83d\\ude00", "b": [1]}\n' * 3, json_rows),
    "roles.tsv": (PROPBANK * 3, role_rows),
    "roles.conll": ("It - (A1*)\nran run (V*)\n\n" * 3, role_rows),
    "a.gold_conll": (f"#begin\n{CONLL2012 * 3}#end", role_rows),
    "coref.conll": ("#begin document (a); part 0\na 0 0 It (0)\na 0 1 is -\n\n#end document\n" * 2, conll_documents),
    "a.vec": ("3 4\nthe 1 2 3 4\nof .5 1e3 0 -1\nNew York 0 0 0 1\n", lambda path: read_word_vectors(path).words),
}


@pytest.mark.parametrize("name", READERS)
def test_data_files(tmp_path, name):
    """What a damaged table means is a matter of opinion: the reader must answer or refuse."""
    content, read = READERS[name]
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="\n")
    assert list(read(path))

    @fuzz
    @given(damaged(content.encode()))
    def check(data):
        path.write_bytes(data)
        answer_of(lambda: list(read(path)), source=str(path))

    check()


ROLES = {"tokens": ["It", "ran"], "predicate_index": [1], "predicate_tags": [["B-A1", "B-V"]]}
ROLES |= {"predicate_lemma": ["run"], "predicate_sense": [""], "predicate_kind": ["verb"]}


@fuzz
@given(changed(ROLES))
def test_rows_of_roles(row):
    """A row that is read is kept, with "" for absent names of predicates, and fits the features."""
    found = answer_of(checked_row, "line 3", row, source="line 3")
    if found is not REFUSED:
        names = {name: [""] * len(row["predicate_index"]) if row.get(name) is None else row[name] for name in found}
        assert found == names and ROLE_FEATURES.encode_example(found) == found


DOCUMENT = {
    "document": "d",
    "sentences": [["He", "said"], ["She", "did", "too"]],
    "mentions": [[1, 0, 2, 7], [0, 0, 0, 3], [1, 0, 0, 3], [1, 2, 2, 0]],
    "speakers": [["Ann", "Ann"], ["Bob", "Bob", "Bob"]],
    "genre": "bc",
}


@fuzz
@given(changed(DOCUMENT).filter(lambda row: "document" in row))  # the reader checks its name
def test_documents(row):
    found = answer_of(document_row, "here", row, source="here")
    if found is not REFUSED:
        spans = [(*span,) for *span, _ in found["mentions"]]
        assert spans == sorted({tuple(mention[:3]) for mention in row["mentions"]})
        given = dict(zip(spans, (cluster for *_, cluster in found["mentions"]), strict=True))
        pairs = {(cluster, given[tuple(span)]) for *span, cluster in row["mentions"]}
        assert len(pairs) == len({cluster for *_, cluster in row["mentions"]})  # no cluster is split


# Vocabularies and tokenizers


def ids_of_vocabulary(data):
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return REFUSED
    if "\0" in text:
        return REFUSED
    words = [word for line in text.split("\n" if "\n" in text else "\r") if (word := line.strip())]
    others = [word for word in words if word not in (*SPECIAL, "!!!MAXTERMID")]
    is_clash = any(word.startswith("\U0010fffd") for word in others)
    if len({*words}) < len(words) or not {*SPECIAL[1:]} <= {*words} or is_clash:
        return REFUSED
    return {word: index for index, word in enumerate([*SPECIAL, *others])}


def test_vocabularies(tmp_path):
    path = tmp_path / "vocab.txt"

    @fuzz
    @given(st.permutations([*SPECIAL[1:], *WORDS, "!!!MAXTERMID"]).map("\n".join).map(str.encode).flatmap(damaged))
    def check(data):
        path.write_bytes(data)
        found = answer_of(lambda: ELMoTokenizer(vocab_file=path).get_vocab(), source=str(path))
        assert found == ids_of_vocabulary(data)

    check()


LEXICON = {name: index for index, name in enumerate(["<bos>", "<eos>", "<oov>", "<pad>", "<bow>", "<eow>", *"theo"])}
OWN_OPTIONS = ("alphabet", "begin_of_word", "end_of_word", "lexicon", "literal_markers", "lowercase_unknown")
OWN_OPTIONS += ("cut_before_lookup", "max_word_length", "pre_tokenization", "pad_token", "split_special_tokens")


@pytest.mark.parametrize("options", [{}, {"alphabet": "lexicon", "lexicon": LEXICON}], ids=["utf8", "lexicon"])
def test_tokenizer_files(tmp_path, options):
    """Ids are those in `tokenizer.json`."""
    ELMoTokenizer(vocab=[*SPECIAL, *WORDS], **options).save_pretrained(tmp_path)
    saved = {name: (tmp_path / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    content, config = map(json.loads, saved.values())
    values = st.tuples(st.sampled_from(OWN_OPTIONS), st.sampled_from([*VALUES, *config.values()]))
    one = values.map(lambda pair: {"tokenizer_config.json": json.dumps({**config, pair[0]: pair[1]}).encode()})
    other = damaged(saved["tokenizer.json"]) | changed(content).map(json.dumps).map(str.encode)

    def read_back():
        tokenizer = ELMoTokenizer.from_pretrained(tmp_path)
        encoded = tokenizer([["the", "of", "Zz", "the"]], is_split_into_words=True, return_tensors="np")
        assert encoded["character_ids"].shape == (1, 6, tokenizer.max_word_length)
        return encoded["input_ids"][0].tolist()

    @fuzz
    @given(one | other.map(lambda data: {"tokenizer.json": data}))
    def check(files):
        for name, data in (saved | files).items():
            (tmp_path / name).write_bytes(data)
        if (found := answer_of(read_back)) is not REFUSED:
            vocab = json.loads((saved | files)["tokenizer.json"])["model"]["vocab"]
            assert found == [1, *(vocab.get(word, 3) for word in ("the", "of", "Zz", "the")), 2]

    check()


NUMBERS = [None, 0, 1, 2, 3, 5, 8, -1, 10**20, 2.5, "3"]
CALLS = st.fixed_dictionaries(
    {
        "truncation": st.sampled_from([True, False, "only_first", "only_second"]),
        "max_length": st.sampled_from(NUMBERS),
        "stride": st.sampled_from([0, 0, 1, 2, -1, 10**20, 2.5, None]),
        "padding": st.sampled_from([False, True, "max_length"]),
        "return_overflowing_tokens": st.booleans(),
        "return_offsets_mapping": st.booleans(),
        "add_special_tokens": st.booleans(),
    }
)
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=5), min_size=2, max_size=2)
TOKENIZER = ELMoTokenizer(vocab=[*SPECIAL, *WORDS])


@settings(fuzz, max_examples=300)
@given(TEXTS, st.none() | TEXTS, CALLS)
def test_calls_of_tokenizers(texts, pairs, options):
    """No text is longer than it may be, no word is lost without a cut, and no option gives a bare error."""
    encoded = answer_of(lambda: TOKENIZER(texts, pairs, is_split_into_words=True, **options))
    if encoded is REFUSED:
        return
    lengths = [sum(mask) for mask in encoded["attention_mask"]]
    assert [len(ids) for ids in encoded["input_ids"]] == [len(rows) for rows in encoded["character_ids"]]
    if options["truncation"] and options["max_length"] is not None:
        assert all(length <= options["max_length"] for length in lengths)
    else:
        markers = (2 + 2 * (pairs is not None)) * options["add_special_tokens"]
        assert lengths == [len(text) + len(pair) + markers for text, pair in zip(texts, pairs or [[], []], strict=True)]


# Batches

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32]
MODELS = {
    "bilm": (ELMoModel, {}),
    "language model": (ELMoForPreTraining, {}),
    "coreference": (ELMoForCoreferenceResolution, {}),
    **HEADS,
}


def spoiled(tensor, kind, draw):
    """A tensor of another dtype, shape or kind, or with another value."""
    if kind == "dtype":
        return tensor.to(draw([*INTEGERS, torch.bool, torch.float32, torch.complex64, torch.uint16]))
    if kind == "shape":
        return draw([tensor[:1], tensor[..., :1], tensor[None], tensor.flatten(), tensor[:0]])
    if kind == "value":
        tensor = tensor.clone()
        tensor.view(-1)[draw(range(tensor.numel()))] = draw([-101, -1, 0, 1, 99, 2**31])
        return tensor
    return draw([tensor.tolist(), tensor.numpy(), "x", 3, (tensor, tensor), None])


@pytest.mark.parametrize("name", [name for name in MODELS if "both" not in name and "output" not in name])
def test_batches(name):
    cls, options = MODELS[name]
    model = make_model(cls, **options) if name in HEADS else cls(make_config()).eval()
    batch = batch_of(model) if name in HEADS else make_batch(model.config)
    targets = {} if cls is ELMoModel else {"labels": batch["input_ids"].where(batch["input_ids"] > 0, -100)}
    if cls is ELMoForCoreferenceResolution:  # of rows with 4, 1 and 3 words
        targets = {"mentions": torch.tensor([[0, 1, 2, 0], [0, 4, 4, 1], [2, 1, 1, 1], [3, 2, 3, 0]])}
    batch |= targets_of(model, batch) if name in HEADS else targets
    keys = ("loss", "logits", "start_logits", "mention_scores", "hidden_states", "final_states")

    @torch.no_grad()
    def run(batch):
        output = model(**batch)
        found = next(output[key] for key in keys if key in output)
        return found if isinstance(found, torch.Tensor) else found[-1]

    clean = run(batch)

    @fuzz
    @given(st.data(), st.sampled_from([*batch]), st.sampled_from(["dtype", "dtype", "shape", "value", "kind"]))
    def check(data, changed, kind):
        other = spoiled(batch[changed], kind, lambda values: data.draw(st.sampled_from(values)))
        found = answer_of(run, {**batch, changed: other})
        if found is not REFUSED:
            is_equal = kind == "dtype" and other.dtype in INTEGERS and bool((other.long() == batch[changed]).all())
            assert torch.equal(found, clean) if is_equal else found.isfinite().all()

    check()
