"""Thousands of damaged texts, vocabularies, tokenizer files, calls and batches: a clean error or the right answer.

An error is clean if it is raised by our code, so that a program prints one line, and if it names the file. Answers are
compared with a short definition of what the input means. Everything else fails. The seed is fixed.
"""

import gzip
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from head_models import HEADS, batch_of, make_batch, make_config, make_model, targets_of

from modeling_elmo import ELMoForCoreferenceResolution, ELMoForPreTraining, ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_data import conll_documents, document_row
from modeling_elmo.run_scripts.fine_tuning.tasks.role_data import ROLE_FEATURES, checked_row, role_rows
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user
from modeling_elmo.run_scripts.program.data_files import column_rows, json_rows, numbered_texts, table_rows
from modeling_elmo.run_scripts.program.files import numbered_lines
from modeling_elmo.run_scripts.vectors.word_vectors import read_word_vectors

TASKS = Path(__file__).parent / "fixtures" / "tasks"
SPECIAL = ["<PAD>", "<S>", "</S>", "<UNK>"]
WORDS = ["the", "of", "London", "밥", "a\u0301", "\U0001f600", "don't", "x" * 60]
VALUES = [None, True, 0, -1, 3, 2.5, 10**9, 2**70, "", "x", "9" * 5000, [], [3], ["a"], {}, {"a": 1}, {"a": {}}]

REFUSED = object()  # an input without an answer: our code must raise an error
RIGHT_OR_REFUSED = object()  # our code must return True, or raise an error


class Invalid(Exception):
    """Raised by the definitions below for an input without an answer."""


class Tally:
    """Counts inputs, clean errors and right answers."""

    def __init__(self):
        self.counts: Counter[str] = Counter()

    def __call__(self, expected: Any, function: Callable, *args: Any, source: str = ""):
        """`source` must be in every error."""
        self.counts["inputs"] += 1
        try:
            found = function(*args)
        except Exception as error:
            clean = is_mistake_of_user(error) or isinstance(error, TypeError) and re.search("pass |must be", str(error))
            assert clean and source in str(error) and len(str(error)) > 20, repr(error)
            assert expected is REFUSED or expected is RIGHT_OR_REFUSED, f"{expected!r} was expected, not {error!r}"
            self.counts["clean errors"] += 1
        else:
            assert found == (True if expected is RIGHT_OR_REFUSED else expected), f"{expected!r}, not {found!r}"
            self.counts["right answers"] += 1

    def show(self, least: int):
        """Both outcomes must be frequent, or the inputs are badly chosen."""
        print(dict(self.counts))
        assert self.counts["inputs"] == self.counts["clean errors"] + self.counts["right answers"]
        assert min(self.counts["clean errors"], self.counts["right answers"]) >= least


def answer(definition: Callable, *args: Any) -> Any:
    try:
        return definition(*args)
    except Invalid:
        return REFUSED


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Bytes after one or two small accidents, or none."""
    array = bytearray(data)
    for _ in range(chance.randrange(3)):
        start = chance.randrange(len(array) + 1)
        end = start + chance.choice([1, 2, 8, 100])
        match chance.choice(["cut", "flip", "insert", "drop", "repeat", "zeros"]):
            case "cut":
                del array[start:]
            case "flip" if array:
                array[start % len(array)] ^= 1 << chance.randrange(8)
            case "insert":
                array[start:start] = chance.choice(
                    [chance.randbytes(end - start), b"\n", b"\r\n", b"[" * 5000, b"\xff"]
                )
            case "drop":
                del array[start:end]
            case "repeat":
                array[start:start] = array[start:end]
            case "zeros":
                array[start:end] = bytes(len(array[start:end]))
    return bytes(array)


def changed(content: Any, chance: random.Random) -> Any:
    """JSON content with one value replaced or removed, at any depth."""
    content = json.loads(json.dumps(content))
    part = content
    while True:
        key = chance.choice(list(part) if isinstance(part, dict) else range(len(part)))
        if not (isinstance(part[key], (dict, list)) and part[key] and chance.random() < 0.7):
            break
        part = part[key]
    if chance.random() < 0.2:
        del part[key]
    else:
        part[key] = chance.choice(VALUES)
    return content


# Texts


def unpacked(data: bytes, suffix: str) -> bytes:
    """The whole content at once."""
    if suffix not in (".gz", ".zst"):
        return data
    if not data:
        raise Invalid
    if suffix == ".gz":
        try:
            return gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise Invalid from error
    content = b""
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            content += frame.decompress(data)
        except zstandard.ZstdError as error:
            raise Invalid from error
        if not frame.eof:
            raise Invalid
        data = frame.unused_data
    return content


def lines_of(data: bytes, suffix: str) -> list[tuple[int, str]]:
    try:
        text = unpacked(data, suffix).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Invalid from error
    lines = text.split("\n")
    return [(number, line.rstrip("\r")) for number, line in enumerate(lines if lines[-1] else lines[:-1], 1)]


def texts_of(data: bytes, suffix: str) -> list[tuple[int, Any]]:
    texts = []
    for number, line in lines_of(data, suffix):
        try:
            record = json.loads(line) if line.strip() else {"text": ""}
            texts.append((number, record["text"]))
        except (ValueError, RecursionError, TypeError, KeyError, IndexError) as error:
            raise Invalid from error
        if not isinstance(record, dict):
            raise Invalid
    return texts


def read_lines(path: Path) -> list[tuple[int, str]]:
    return list(numbered_lines(path))


def read_texts(path: Path) -> list[tuple[int, Any]]:
    return list(numbered_texts(path, "text"))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_texts(tmp_path, suffix):
    chance, tally = random.Random(f"texts{suffix}"), Tally()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    lines = [" ".join(chance.choices(WORDS, k=5)) for _ in range(20)]
    records = [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
    for _ in range(400):
        inside = chance.random() < 0.5  # before it is packed
        for name, content in (("a.txt", lines), ("a.jsonl", records)):
            data = "\n".join(content).encode()
            data = pack(damaged(data, chance)) if inside else damaged(pack(data), chance)
            path = tmp_path / f"{name}{suffix}"
            path.write_bytes(data)
            tally(answer(lines_of, data, suffix), read_lines, path, source=str(path))
            if name == "a.jsonl":
                tally(answer(texts_of, data, suffix), read_texts, path, source=str(path))
    tally.show(least=200)


PROPBANK = "x\t0\tIt\tPRP\t-\t-\t(A1*)\nx\t1\tran\tVBD\trun\trun.01\t(V*)\n\n"
CONLL2012 = "d 0 0 It PRP (S* - - - A * (A1*) -\nd 0 1 ran VBD *) run 01 1 A * (V*) -\n\n"
ROLES = {"tokens": ["It", "ran"], "predicate_index": [1], "predicate_tags": [["B-A1", "B-V"]]}
ROLES |= {"predicate_lemma": ["run"], "predicate_sense": [""], "predicate_kind": ["verb"]}

READERS = {
    "a.conll": ("EU\tB-ORG\nrejects\tO\n\n" * 5, lambda path: list(column_rows(path, "tokens", None, None, []))),
    "a.conllu": (
        "1\t밥\t_\tNOUN\t_\n2-3\tx\t_\t_\t_\n\n" * 5,
        lambda path: list(column_rows(path, "t", None, None, [])),
    ),
    "a.tsv": ("text\tlabel\na b\tx\n밥\ty\n" + "c\tx\n" * 5, lambda path: list(table_rows(path, []))),
    "a.csv": ('text,label\n"a\nb",x\n밥,y\n' + "c,x\n" * 5, lambda path: list(table_rows(path, []))),
    "text.conll": ("EU B-ORG\nrejects O\n\n" * 5, lambda path: list(numbered_texts(path, "text"))),
    "text.tsv": ("text\tlabel\na b\tx\n밥\ty\n" + "c\tx\n" * 5, lambda path: list(numbered_texts(path, "text"))),
    "a.json": (json.dumps({"data": [{"a": "밥"}] * 5}, ensure_ascii=False), lambda path: list(json_rows(path))),
    "a.jsonl": ('{"a": "\\ud83d\\ude00", "b": [1]}\n' * 5, lambda path: list(json_rows(path))),
    "roles.tsv": (PROPBANK * 5, lambda path: list(role_rows(path))),
    "roles.conll": ("It - (A1*)\nran run (V*)\n\n" * 5, lambda path: list(role_rows(path))),
    "a.gold_conll": (f"#begin\n{CONLL2012 * 5}#end", lambda path: list(role_rows(path))),
    "a.vec": ("3 4\nthe 1 2 3 4\nof .5 1e3 0 -1\nNew York 0 0 0 1\n", lambda path: read_word_vectors(path).words),
}


@pytest.mark.parametrize("name", READERS)
def test_data_files(tmp_path, name):
    """What a damaged table means is a matter of opinion: the reader must answer or refuse."""
    chance, tally = random.Random(name), Tally()
    content, read = READERS[name]
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="\n")
    whole = read(path)
    for _ in range(300):
        data = damaged(content.encode(), chance)
        path.write_bytes(data)
        if data == content.encode():
            tally(whole, read, path)
        else:
            tally(RIGHT_OR_REFUSED, lambda path: isinstance(read(path), list), path, source=str(path))
    tally.show(least=50)


def test_rows_of_roles():
    chance, tally = random.Random("roles"), Tally()
    for _ in range(800):
        row = changed(ROLES, chance)
        tally(RIGHT_OR_REFUSED, lambda row: is_role_row(checked_row("line 3", row), row), row, source="line 3")
    tally.show(least=50)


def is_role_row(found: dict, row: dict) -> bool:
    """Whether the row is kept, with "" for absent names of predicates, and fits the features."""
    kept = {name: [""] * len(row["predicate_index"]) if row.get(name) is None else row[name] for name in ROLE_FEATURES}
    return found == kept and ROLE_FEATURES.encode_example(found) == found


# Coreference


def brackets_of(path: Path) -> list[tuple[str, list[str]]]:
    """Each word and its brackets, sorted, read line by line."""
    lines = [line for _, line in lines_of(path.read_bytes(), "") if line.strip(" \t")]
    fields = [line.split("\t") if "\t" in line else line.split(" ") for line in lines if line[:1] != "#"]
    cells = [(row[3], re.sub(r"\b0+(?=\d)", "", row[-1].strip(" "))) for row in fields]
    return [(word, [] if cell in ("-", "_", "") else sorted(cell.split("|"))) for word, cell in cells]


def brackets_from(rows: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The same from the documents that were read."""
    found: list[tuple[str, list[str]]] = []
    for row in rows:
        starts = np.cumsum([len(found), *map(len, row["sentences"])])
        found += [(word, []) for words in row["sentences"] for word in words]
        for sentence, first, last, cluster in row["mentions"]:
            found[starts[sentence] + first][1].append(f"({cluster})" if first == last else f"({cluster}")
            found[starts[sentence] + last][1].extend([f"{cluster})"] * (first < last))
    return [(word, sorted(cells)) for word, cells in found]


def test_documents_in_columns(tmp_path):
    chance, tally = random.Random("columns"), Tally()
    content = (TASKS / "litbank_dev.conll").read_text().splitlines()
    path = tmp_path / "a.conll"

    def is_right(path: Path) -> bool:
        located = list(conll_documents(path))
        checked = [document_row(*row) for row in located]
        for (_, row), one in zip(located, checked, strict=True):
            assert {tuple(mention[:3]) for mention in row["mentions"]} == {tuple(each[:3]) for each in one["mentions"]}
        return brackets_from([row for _, row in located]) == brackets_of(path)

    for _ in range(300):
        start = chance.randrange(1, len(content) - 60)
        data = "\n".join([content[0], *content[start : start + 40], "", "#end document"]).encode()
        path.write_bytes(damaged(data, chance) if chance.random() < 0.7 else data)
        tally(RIGHT_OR_REFUSED, is_right, path, source=str(path))
    tally.show(least=50)


def test_documents_in_records():
    chance, tally = random.Random("records"), Tally()
    record = {
        "document": "d",
        "sentences": [["He", "said"], ["She", "did", "too"]],
        "mentions": [[1, 0, 2, 7], [0, 0, 0, 3], [1, 0, 0, 3], [1, 2, 2, 0]],
        "speakers": [["Ann", "Ann"], ["Bob", "Bob", "Bob"]],
        "genre": "bc",
    }

    def is_right(row: dict[str, Any]) -> bool:
        found = document_row("here", row)["mentions"]
        spans = [(*span,) for *span, _ in found]
        assert spans == sorted({tuple(mention[:3]) for mention in row["mentions"]})
        assert all(row["sentences"][number][first : last + 1] for number, first, last in spans)
        given = dict(zip(spans, (cluster for *_, cluster in found), strict=True))
        pairs = {(cluster, given[tuple(span)]) for *span, cluster in row["mentions"]}
        return len(pairs) == len({cluster for *_, cluster in row["mentions"]})  # no cluster is split

    for _ in range(600):
        row = changed(record, chance)
        if "document" in row:  # whose name is checked by the reader
            tally(RIGHT_OR_REFUSED, is_right, row, source="here")
    tally.show(least=50)


# Vocabularies and tokenizers


def ids_of_vocabulary(data: bytes) -> dict[str, int]:
    try:
        words = [line.strip() for line in data.decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise Invalid from error
    words = [word for word in words if word]
    if len(set(words)) < len(words) or not {*SPECIAL[1:]} <= {*words}:
        raise Invalid
    words = [*SPECIAL, *(word for word in words if word not in (*SPECIAL, "!!!MAXTERMID"))]
    if any(word.startswith("\U0010fffd") for word in words):
        raise Invalid
    return {word: index for index, word in enumerate(words)}


def test_vocabularies(tmp_path):
    chance, tally = random.Random("vocabularies"), Tally()
    path = tmp_path / "vocab.txt"
    for _ in range(800):
        words = [*SPECIAL[1:], *WORDS, "!!!MAXTERMID"]
        chance.shuffle(words)
        data = damaged("\n".join(words).encode(), chance)
        path.write_bytes(data)
        found = lambda path: ELMoTokenizer(vocab_file=path).get_vocab()  # noqa: E731
        tally(answer(ids_of_vocabulary, data), found, path, source=str(path))
    tally.show(least=200)


def test_vocabularies_in_memory():
    chance, tally = random.Random("memory"), Tally()
    words = [*SPECIAL, *WORDS]
    for _ in range(800):
        vocab: Any = changed(chance.choice([words, {word: index for index, word in enumerate(words)}]), chance)
        vocab = chance.choice([vocab, vocab, vocab, chance.choice(VALUES)])
        tally(RIGHT_OR_REFUSED, lambda vocab: ELMoTokenizer(vocab=vocab)("")["input_ids"] == [1, 2], vocab)
    tally.show(least=50)


OWN_OPTIONS = ("alphabet", "begin_of_word", "end_of_word", "lexicon", "literal_markers", "lowercase_unknown")
OWN_OPTIONS += ("cut_before_lookup",)
OWN_OPTIONS += ("max_word_length", "pre_tokenization", "pad_token", "bos_token", "split_special_tokens")
LEXICON = {
    name: index for index, name in enumerate(["<bos>", "<eos>", "<oov>", "<pad>", "<bow>", "<eow>", *"theof"[:4]])
}


def read_back(folder: Path, expected: Any) -> bool:
    tokenizer = ELMoTokenizer.from_pretrained(folder)
    encoded = tokenizer([["the", "of", "Zz", "the"]], is_split_into_words=True, return_tensors="np")
    assert encoded["character_ids"].shape == (1, 6, tokenizer.max_word_length)
    return encoded["input_ids"][0].tolist() == expected


def ids_in_file(folder: Path) -> list[int]:
    """The ids of `read_back` by the words in `tokenizer.json`."""
    try:
        vocab = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
        return [1, *(vocab.get(word, 3) for word in ("the", "of", "Zz", "the")), 2]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, FileNotFoundError):
        raise Invalid from None


@pytest.mark.parametrize("options", [{}, {"alphabet": "lexicon", "lexicon": LEXICON}], ids=["utf8", "lexicon"])
def test_tokenizer_files(tmp_path, options):
    chance, tally = random.Random("files"), Tally()
    ELMoTokenizer(vocab=[*SPECIAL, *WORDS], **options).save_pretrained(tmp_path)
    saved = {name: (tmp_path / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    for _ in range(300):
        for name, data in saved.items():
            (tmp_path / name).write_bytes(data)
        content = json.loads(saved["tokenizer.json"])
        kind = chance.choice(["bytes", "structure", "option", "absent"])
        path = tmp_path / "tokenizer.json"
        if kind == "bytes":
            path.write_bytes(damaged(saved["tokenizer.json"], chance))
        elif kind == "structure":
            path.write_text(json.dumps(changed(content, chance)))
        elif kind == "option":
            config = json.loads(saved["tokenizer_config.json"])
            config[chance.choice(OWN_OPTIONS)] = chance.choice([*VALUES, *config.values()])
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        else:
            chance.choice([path.unlink, lambda: (tmp_path / "tokenizer_config.json").write_text("[" * 5000)])()
        tally(RIGHT_OR_REFUSED, read_back, tmp_path, answer(ids_in_file, tmp_path))
    tally.show(least=20)


def test_calls_of_tokenizers():
    """No text is longer than it may be, no word is lost without a cut, and no option gives a bare error."""
    chance, tally = random.Random("calls"), Tally()
    tokenizer = ELMoTokenizer(vocab=[*SPECIAL, *WORDS])
    numbers = [None, 0, 1, 2, 3, 5, 8, -1, 10**20, 2.5, "3"]
    for _ in range(2000):
        texts = [chance.choices(WORDS, k=chance.randrange(6)) for _ in range(chance.randrange(1, 4))]
        pairs = chance.choice([None, [chance.choices(WORDS, k=chance.randrange(6)) for _ in texts]])
        options = {
            "truncation": chance.choice([True, False, "only_first", "only_second"]),
            "max_length": chance.choice(numbers),
            "stride": chance.choice([0, 0, 0, 0, 1, 2, -1, 10**20, 2.5, None]),
            "padding": chance.choice([False, True, "max_length"]),
            "return_overflowing_tokens": chance.random() < 0.3,
            "return_offsets_mapping": chance.random() < 0.3,
            "add_special_tokens": chance.random() < 0.8,
        }
        if not options["truncation"]:  # transformers itself compares it with the maximum length
            options["pad_to_multiple_of"] = chance.choice([None, None, 4, 10**20, "8"])

        def encode(texts=texts, pairs=pairs, options=options) -> bool:
            encoded = tokenizer(texts, pairs, is_split_into_words=True, **options)
            lengths = [sum(mask) for mask in encoded["attention_mask"]]
            is_cut = bool(options["truncation"]) and options["max_length"] is not None
            words = [len(text) + len(pair) for text, pair in zip(texts, pairs or [[]] * len(texts), strict=True)]
            markers = (2 + 2 * (pairs is not None)) * options["add_special_tokens"]
            assert [len(ids) for ids in encoded["input_ids"]] == [len(rows) for rows in encoded["character_ids"]]
            if not is_cut:
                return lengths == [count + markers for count in words]
            return all(length <= options["max_length"] for length in lengths)

        tally(RIGHT_OR_REFUSED, encode)
    tally.show(least=200)


# Batches


def spoiled(batch: dict[str, Any], chance: random.Random) -> tuple[dict[str, Any], bool]:
    """A batch with one tensor of another dtype, shape, kind or with other values, and whether it means the same."""
    batch = dict(batch)
    name = chance.choice(list(batch))
    tensor = batch[name]
    integers = [torch.uint8, torch.int8, torch.int16, torch.int32]
    match chance.choice(["dtype", "dtype", "shape", "value", "kind", "missing"]):
        case "dtype":
            dtype = chance.choice([*integers, torch.bool, torch.float32, torch.complex64, torch.uint16])
            batch[name] = tensor.to(dtype)
            return batch, dtype in integers and bool((batch[name].long() == tensor).all())
        case "shape":
            batch[name] = chance.choice([tensor[:1], tensor[..., :1], tensor[None], tensor.flatten(), tensor[:0]])
        case "value":
            batch[name] = tensor.clone()
            batch[name].view(-1)[chance.randrange(tensor.numel())] = chance.choice([-101, -1, 0, 1, 99, 2**31])
        case "kind":
            batch[name] = chance.choice([tensor.tolist(), tensor.numpy(), "x", 3, (tensor, tensor)])
        case "missing":
            del batch[name]
    return batch, False


MODELS = {
    "bilm": (ELMoModel, {}),
    "language model": (ELMoForPreTraining, {}),
    "coreference": (ELMoForCoreferenceResolution, {}),
    **HEADS,
}


@pytest.mark.parametrize("name", [name for name in MODELS if "both" not in name and "output" not in name])
def test_batches(name):
    chance, tally = random.Random(name), Tally()
    cls, options = MODELS[name]
    model = make_model(cls, **options) if name in HEADS else cls(make_config()).eval()
    batch = batch_of(model) if name in HEADS else make_batch(model.config)
    targets = {} if cls is ELMoModel else {"labels": batch["input_ids"].where(batch["input_ids"] > 0, -100)}
    if cls is ELMoForCoreferenceResolution:  # of rows with 4, 1 and 3 words
        targets = {"mentions": torch.tensor([[0, 1, 2, 0], [0, 4, 4, 1], [2, 1, 1, 1], [3, 2, 3, 0]])}
    batch |= targets_of(model, batch) if name in HEADS else targets

    def run(batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch)
        found = next(
            output[key]
            for key in ("loss", "logits", "start_logits", "mention_scores", "hidden_states", "final_states")
            if key in output
        )
        return found if isinstance(found, torch.Tensor) else found[-1]

    def is_right(batch: dict[str, Any], is_equal: bool) -> bool:
        found = run(batch)
        return torch.equal(found, clean) if is_equal else bool(found.isfinite().all())

    with torch.no_grad():
        clean = run(batch)
        for _ in range(150):
            tally(RIGHT_OR_REFUSED, is_right, *spoiled(batch, chance))
    tally.show(least=20)


def test_states_and_vectors():
    chance, tally = random.Random("states"), Tally()
    model = make_model(ELMoModel)
    batch = make_batch(model.config)

    def is_right(**inputs: Any) -> bool:
        return bool(model(**inputs).last_hidden_state.isfinite().all())

    vectors = torch.randn(*batch["input_ids"].shape, model.config.projection_size)
    kinds = [vectors, vectors.half(), vectors.long(), vectors[:1], vectors[0], vectors.cfloat(), np.ones(3)]
    with torch.no_grad():
        states = model(**batch).final_states
        for _ in range(300):
            wrong = [chance.choice([x, x, x.double(), x.half(), x[:1], x.long(), *VALUES]) for x in states]
            whole = chance.choice(
                [tuple(wrong), wrong, tuple(wrong[:1]), (*wrong, None), wrong[0], dict.fromkeys("ab")]
            )
            tally(RIGHT_OR_REFUSED, partial(is_right, **batch, initial_states=whole))
            tally(RIGHT_OR_REFUSED, partial(is_right, inputs_embeds=chance.choice(kinds)))
    tally.show(least=50)
