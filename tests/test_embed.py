"""Vectors of a corpus equal the model's vectors of each sentence alone, also after interruptions."""

import copy
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import MagicMock

import datasets
import h5py
import numpy as np
import psutil
import pytest
import torch
from bilm_models import make_tokenizer, needs_int8, save
from endings import conclusion, printed_by
from errors import refused
from places import ELMO_FIXTURES, FIXTURES
from pretraining_worker import arguments_of, torchrun, two_machines
from task_worker import written

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoModel, ELMoTokenizer
from modeling_elmo.conversion.formats import convert_checkpoint, load_for_export
from modeling_elmo.conversion.original import OriginalCheckpoint
from modeling_elmo.modeling_elmo import ScalarMix
from modeling_elmo.run_scripts import embed
from modeling_elmo.run_scripts.program import processes
from modeling_elmo.run_scripts.program.files import read_json
from modeling_elmo.run_scripts.program.models import load_pretrained
from modeling_elmo.run_scripts.vectors import embedding, outputs
from modeling_elmo.run_scripts.vectors.lines import fasta_records

TOLERANCE = 2e-6
DIM, LAYERS = 12, 3
LINES = [
    "The play was staged in Paris .",
    "",
    "They play chess",
    "밥 말이 😀 <S> \u00e9",
    "The play was staged in Paris .",  # twice
    "one",
    "   ",
    "a longer sentence so that the batch of these lines has to be padded a good deal , word after word after word",
    "They  play\tchess",  # other white space
]
WORDS = [line.split() for line in LINES]
PROTEINS = FIXTURES / "proteins" / "proteins.fasta"


def tiny(**options):
    filters = [[1, 4], [2, 8]]
    return ELMoConfig(char_cnn_filters=filters, projection_size=DIM // 2, lstm_hidden_size=10, **options)


def save_model(folder, model):
    return save(folder, model, ELMoTokenizer(pre_tokenization="moses"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    model = ELMoModel(tiny())
    with torch.no_grad():
        model.scalar_mix.weights.copy_(torch.tensor([0.3, -1.0, 2.0]))
        model.scalar_mix.gamma.fill_(1.7)
    return save_model(tmp_path_factory.mktemp("model"), model)


@pytest.fixture(scope="module")
def loaded(model_dir):
    return ELMoModel.from_pretrained(model_dir).eval(), ELMoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def alone(loaded):
    return partial(vectors_alone, *loaded)


def write_lines(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="")
    return path


@pytest.fixture
def embedded(model_dir, tmp_path):
    """A function that runs the program, by default on LINES, and returns the output file."""

    def run(output="v.hdf5", model=model_dir, **options):
        if "dataset" not in options:
            options.setdefault("input", write_lines(tmp_path / "corpus.txt", LINES))
        return embed.main(arguments_of({"model": model, "output": tmp_path / output, **options}))

    return run


@torch.no_grad()
def vectors_alone(model, tokenizer, sentences, layers="all", pooling="none"):
    """The reference: the model called on each sentence by itself, its words or its text."""
    return [pooled(layer_of(model, tokenizer, each, layers), pooling) for each in sentences]


def layer_of(model, tokenizer, sentence, layers):
    given = {"is_split_into_words": not isinstance(sentence, str)}
    output = model(**tokenizer([sentence], return_tensors="pt", **given))
    stack = np.stack([layer[0, 1:-1].numpy() for layer in output.hidden_states])
    weights = np.exp([0.3, -1.0, 2.0]) / np.exp([0.3, -1.0, 2.0]).sum()
    return {
        "all": stack,
        "top": stack[-1],
        "average": (stack[0] + stack[1] + stack[2]) / 3,
        "sum": stack[0] + stack[1] + stack[2],
        "mixed": 1.7 * np.tensordot(weights, stack, 1),
    }[layers]


def pooled(vectors, pooling):
    if pooling == "none":
        return vectors
    if not vectors.shape[-2]:
        return np.zeros(vectors.shape[:-2] + vectors.shape[-1:])
    return vectors.mean(-2) if pooling == "mean" else vectors.max(-2)


def read_table(path):
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(path.parent))


def read(path):
    """The vectors of each line, as a user would read them."""
    if path.suffix == ".parquet":
        return [np.array(row) if row else row for row in read_table(path)["vectors"]]
    with h5py.File(path) as file:
        names = sorted(set(file) - {"sentence_to_index"}, key=lambda name: (len(name), name))
        if names == ["sentence_vectors"]:
            return list(file["sentence_vectors"][:])
        assert names == [str(number) for number in range(len(names))]
        return [file[name][:] for name in names]


def assert_close(found, expected, tolerance=TOLERANCE):
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other.size:
            assert np.shape(one) == other.shape, number
            assert np.abs(one - other).max() <= tolerance, number
        else:
            assert np.size(one) == 0, number


@pytest.mark.parametrize(
    "suffix, layers, pooling",
    [
        *((".hdf5", layers, "none") for layers in ("all", "top", "average", "sum")),
        *((".h5", "mixed", "none"), (".parquet", "all", "none")),
        *((".hdf5", "all", "mean"), (".h5", "mixed", "max"), (".parquet", "all", "max")),
    ],
)
def test_each_line_has_the_vectors_that_it_has_alone(embedded, alone, suffix, layers, pooling):
    path = embedded(f"vectors{suffix}", layers=layers, pooling=pooling, batch_tokens=40)
    assert not Path(f"{path}.unfinished").exists()
    if suffix == ".parquet":
        assert read_table(path)["text"][:] == [line.strip() for line in LINES]
        assert read_table(path)["tokens"][:] == WORDS
    assert_close(read(path), alone(WORDS, layers, pooling))


def test_hdf5_has_the_layout_of_the_elmo_command(embedded):
    with h5py.File(embedded()) as file:
        assert file["0"].shape == (LAYERS, 7, DIM) and file["0"].dtype == np.float32
        assert file["1"].shape == file["6"].shape == (LAYERS, 0, DIM)
        assert file["sentence_to_index"].shape == (1,)
        index = json.loads(file["sentence_to_index"][0])
        assert index == {line.strip(): str(number) for number, line in enumerate(LINES)}
        assert index[LINES[0]] == "4" and np.allclose(file["0"], file["4"], atol=TOLERANCE)
    with h5py.File(embedded("f.hdf5", forget_sentences=True)) as file:
        assert set(file) == set(map(str, range(len(LINES))))


@pytest.mark.parametrize("suffix", [".hdf5", ".parquet"])
def test_float16(embedded, alone, suffix):
    found = read(embedded(f"v{suffix}", dtype="float16", layers="top"))
    assert_close(found, [vectors.astype(np.float16) for vectors in alone(WORDS, "top")], 1e-3)
    assert suffix == ".parquet" or found[0].dtype == np.float16


def test_vectors_that_are_too_large_for_float16(embedded, tmp_path):
    model = ELMoModel(tiny())
    torch.nn.init.constant_(model.token_projection.bias, 1e5)
    with refused("Vectors of 'a longer .* float16, .* dtype float32"):
        embedded(model=save_model(tmp_path / "m", model), dtype="float16")


def test_bfloat16_computation(embedded, alone):
    found = read(embedded(compute_dtype="bfloat16", layers="top"))
    assert found[0].dtype == np.float32
    assert_close(found, alone(WORDS, "top"), 0.05)


@pytest.mark.parametrize("obstacle", [None, "this processor has no instructions for bfloat16"])
def test_without_its_instructions_bfloat16_becomes_float32(obstacle, embedded, tmp_path, monkeypatch):
    """The settings of the unfinished output name what was computed."""
    monkeypatch.setattr(processes, "bfloat16_obstacle", lambda: obstacle)
    monkeypatch.setattr(outputs.UnfinishedOutput, "complete", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        embedded(compute_dtype="bfloat16")
    settings = read_json(tmp_path / "v.hdf5.unfinished" / "settings.json")
    assert settings["compute_dtype"] == ("bfloat16" if obstacle is None else "float32")


@needs_int8
def test_int8_computation(embedded, loaded):
    found = read(embedded(compute_dtype="int8", layers="top"))
    assert found[0].dtype == np.float32
    model, tokenizer = loaded
    assert_close(found, vectors_alone(copy.deepcopy(model).quantize(), tokenizer, WORDS, "top"), 1e-2)
    with refused("--compute_dtype int8 .* --device cuda; pass bfloat16."):
        embedded("w.hdf5", compute_dtype="int8", device="cuda")


def test_raw_text_is_split_by_the_tokenizer(embedded, alone, tmp_path):
    texts = ["They didn't play chess, did they?", "", "One."]
    path = embedded("v.parquet", input=write_lines(tmp_path / "c.txt", texts), raw_text=True)
    words = [["They", "didn", "'t", "play", "chess", ",", "did", "they", "?"], [], ["One", "."]]
    assert read_table(path)["tokens"][:] == words
    assert_close(read(path), alone(words))
    assert_close(read(path), alone(texts))


def test_columns_of_tables_stay(embedded, tmp_path, warnings_of_transformers):
    """One row may have several sentences, and another file other columns or none."""
    (tmp_path / "a.tsv").write_text("year\ttext\tfile\n1990\tOne. Two.\tx\n\n2000\tThree.\t\n", "utf-8")
    (tmp_path / "b.csv").write_text('text,genre,year\n"Four, five.","a ""b""",\n', "utf-8")
    write_lines(tmp_path / "c.txt", ["Six."])
    files = [tmp_path / name for name in ("a.tsv", "b.csv", "c.txt")]
    path = embedded("v.parquet", input=files, raw_text=True, split_sentences="en", batch_tokens=4)
    table = read_table(path)
    assert table.column_names == ["file", "line", "text", "tokens", "vectors", "year", "genre"]
    assert table["text"][:] == ["One.", "Two.", "Three.", "Four, five.", "Six."]
    assert table["year"][:] == ["1990", "1990", "2000", "", None]
    assert table["genre"][:] == [None, None, None, 'a "b"', None]
    assert "a.tsv: the column 'file' is left out, because the output has one" in warnings_of_transformers.text
    with h5py.File(embedded("v.hdf5", input=files, raw_text=True, split_sentences="en")) as file:
        assert file.keys() == {*"01234", "files", "lines", "sentence_to_index"}


def test_given_words_stay_whole(embedded, alone, tmp_path):
    words = ["New York", "", "\ud800", "<S>", "can't"]
    path = write_lines(tmp_path / "c.jsonl", [json.dumps({"words": words}), json.dumps({"words": "can't"})])
    found = read(embedded("v.parquet", input=path, text_column="words", raw_text=True))
    assert_close(found, alone([words, ["can", "'t"]]))


@pytest.mark.parametrize("options", [{"split": "test"}, {"streaming": True}], ids=str)
def test_data_sets(embedded, alone, tmp_path, options):
    data, folder = datasets.Dataset.from_dict({"words": WORDS}), tmp_path / "data"
    if "split" in options:
        datasets.DatasetDict(train=data.select([0]), test=data).save_to_disk(folder)
    else:
        data.to_parquet(folder / "train.parquet")
    assert_close(read(embedded(dataset=folder, text_column="words", **options)), alone(WORDS))


# Proteins: SeqVec's format and use

SEQUENCES = {each.name: each.text for _, each in fasta_records(PROTEINS)}
RESIDUES = list(map(list, SEQUENCES.values()))


@pytest.mark.parametrize("pooling", ["none", "mean"])
@pytest.mark.parametrize("batch_tokens", [1, 300])  # sequences alone, in two batches
def test_proteins(embedded, alone, batch_tokens, pooling):
    options = {"layers": "sum", "unit": "character", "batch_tokens": batch_tokens, "pooling": pooling}
    with h5py.File(embedded("p.h5", input=PROTEINS, **options)) as file:
        assert set(file) == {"sp|P01308|INS_HUMAN", "sp|P00698|LYSC_CHICK", "UBIQ_HUMAN_1-76"}
        found = [file[name.replace("/", "_")][:] for name in SEQUENCES]
    assert_close(found, alone(RESIDUES, "sum", pooling), 1e-5)


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_proteins_as_a_table(embedded, alone, tmp_path, pooling):
    packed = written(tmp_path / "p.fa.gz", PROTEINS.read_text())
    path = embedded("v.parquet", input=packed, layers="sum", pooling=pooling)
    table = read_table(path)
    assert table.column_names == ["name", "text", "tokens", "vectors"]
    assert table["name"][:] == list(SEQUENCES) and table["text"][:] == list(SEQUENCES.values())
    assert table["tokens"][:] == RESIDUES
    assert_close(read(path), alone(RESIDUES, "sum", pooling), 1e-5)


@pytest.mark.parametrize(
    "output, options, unit",
    [
        ("v.hdf5", {"layers": "all"}, "for each token 3 layers of 12 numbers"),
        ("v.hdf5", {"layers": "top"}, "for each token a vector of 12 numbers"),
        ("v.hdf5", {"layers": "top", "pooling": "mean"}, "for each line a vector of 12 numbers"),
        ("v.parquet", {"layers": "top"}, "for each token a vector of 12 numbers"),
        ("p.h5", {"input": PROTEINS, "layers": "sum"}, "for each token a vector of 12 numbers"),
    ],
)
def test_the_last_lines(embedded, capsys, output, options, unit):
    path = embedded(output, **options)
    told, (*python, code) = conclusion(capsys.readouterr().out)
    assert python == ["python", "-c"] and told.startswith(f"{path} has ") and told.endswith(f" tokens, and {unit}.")
    shown = printed_by(code)
    if path.suffix == ".parquet":
        assert "vectors" in shown
    else:
        with h5py.File(path) as file:
            first = {"p.h5": "sp|P01308|INS_HUMAN"}.get(output, "0")
            assert shown == f"{file['sentence_vectors'][0] if 'pooling' in options else file[first][:]}\n"


def test_letters_of_a_text(embedded, tmp_path):
    texts = ["MKL VF*", "", "밥a", json.dumps("x")]
    path = embedded("v.parquet", input=write_lines(tmp_path / "c.txt", texts), unit="character")
    assert read_table(path)["tokens"][:] == [list("MKLVF*"), [], ["밥", "a"], list('"x"')]


def test_word_level_model(embedded, tmp_path):
    model = ELMoModel(tiny(char_vocab_size=0, word_embedding_size=6, vocab_size=6)).eval()
    save(tmp_path / "m", model, make_tokenizer("play", "chess"))
    found = read(embedded(model=tmp_path / "m"))
    with torch.no_grad():
        ids = torch.tensor([[1, 3, 4, 5, 2]])
        expected = torch.stack(model(input_ids=ids).hidden_states)[:, 0, 1:-1].numpy()
    assert_close([found[2]], [expected])


# Memory


def test_sentences_are_read_as_they_are_needed(loaded):
    read_so_far = 0

    def endless():
        nonlocal read_so_far
        for number in count():
            read_so_far += 1
            yield ["word"] * (number % 5)

    vectors = embedding.embed_sentences(endless(), *loaded, batch_tokens=50)
    for number in range(1000):
        tokens, found = next(vectors)
        assert tokens == ["word"] * (number % 5) and found.shape == (number % 5, DIM)
        assert read_so_far - number <= 4 * 50 / 2  # four batches of blank lines, which are two markers


def test_sentences_may_be_texts_or_words(loaded, alone):
    found = list(embedding.embed_sentences(["They didn't.", ["They", "didn't."], "", []], *loaded, layers="all"))
    tokens, vectors = zip(*found, strict=True)
    assert tokens == (["They", "didn", "'t", "."], ["They", "didn't."], [], [])
    assert_close(vectors, alone(tokens))
    with refused("has no mix of its layers"):
        next(embedding.embed_sentences(["a"], ELMoModel(tiny(), add_mixing_layer=False).eval(), loaded[1]))
    with refused("in training mode, with dropout; call `model.eval"):
        next(embedding.embed_sentences(["a"], ELMoModel(tiny()), loaded[1]))
    with refused("an ELMoForPreTraining; pass its biLM, `model.base_model`", TypeError):
        next(embedding.embed_sentences(["a"], ELMoForPreTraining(tiny()).eval(), loaded[1]))


# Interruptions


@pytest.fixture
def long_corpus(tmp_path):
    random = np.random.default_rng(0)
    lines = [" ".join(f"w{n}" for n in random.integers(0, 300, random.integers(0, 25))) for _ in range(300)]
    return write_lines(tmp_path / "long.txt", lines)


def count_lines(monkeypatch):
    """Returns a list that receives the text of each line that is embedded from now on."""
    seen, compute_block = [], embed.compute_block

    def counted(block, *arguments):
        seen.extend(line.text for line in block.lines)
        return compute_block(block, *arguments)

    monkeypatch.setattr(embed, "compute_block", counted)
    return seen


@pytest.mark.parametrize("name", ["v.hdf5", "v.parquet"])
def test_an_interruption_while_the_output_is_completed(name, embedded, tmp_path, monkeypatch):
    """The second run has nothing to compute, whatever the first one left behind its last block."""
    expected = embedded(f"whole.{name}", batch_tokens=4).read_bytes()
    sync_file = outputs.sync_file
    for_complete = MagicMock(side_effect=ZeroDivisionError)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        complete = outputs.UnfinishedOutput.complete

        def interrupted(output):
            patch.setattr(outputs, "sync_file", for_complete)
            complete(output)

        patch.setattr(outputs.UnfinishedOutput, "complete", interrupted)
        embedded(name, batch_tokens=4)
    assert for_complete.called and outputs.sync_file is sync_file and not (tmp_path / name).exists()
    seen = count_lines(monkeypatch)
    assert embedded(name).read_bytes() == expected and seen == []


def test_an_interruption_while_the_folder_is_removed(embedded, tmp_path, monkeypatch):
    output, folder = tmp_path / "v.hdf5", tmp_path / "v.hdf5.unfinished"
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.setattr(outputs, "shutil", None)
        embedded(batch_tokens=8)
    assert len(read(output)) == len(LINES) and folder.exists()
    with refused("v.hdf5 exists", FileExistsError):
        embedded()
    output.unlink()
    assert len(read(embedded())) == len(LINES) and not folder.exists()


@pytest.fixture
def interrupted(embedded, tmp_path, monkeypatch):
    """The output file of a run that was interrupted after two blocks."""
    append, calls = outputs.UnfinishedOutput.append, count()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(outputs.UnfinishedOutput, "append", lambda *args: append(*args) if next(calls) < 2 else 1 / 0)
        embedded(batch_tokens=4)
    return tmp_path / "v.hdf5"


def test_a_resumed_run_may_have_other_batches(embedded, alone, interrupted):
    assert_close(read(embedded(batch_tokens=100)), alone(WORDS))


CHANGES = [("layers", "top"), ("pooling", "mean"), ("dtype", "float16"), ("raw_text", True)]


@pytest.mark.parametrize("name, value", CHANGES)
def test_a_resumed_run_with_other_settings(name, value, embedded, interrupted):
    with refused(rf"other settings: {name} \w+, now {value}\."):
        embedded(**{name: value})


def test_a_resumed_run_with_another_model(model_dir, embedded, interrupted, tmp_path):
    with refused("other settings: .*weights"):
        embedded(model=save_model(tmp_path / "other", ELMoModel(tiny())))
    for file in ("config.json", "tokenizer_config.json"):
        changed = shutil.copytree(model_dir, tmp_path / file)
        content = read_json(changed / file)
        (changed / file).write_text(json.dumps(content | {"cell_clip": 1.0, "pre_tokenization": "whitespace"}))
        with refused(r"other settings: model \w+, now \w+\. "):
            embedded(model=changed)


@pytest.mark.parametrize(
    "first, lines",
    [
        *((1, ["other", *LINES[1:]]), (4, [*LINES[:3], "other", *LINES[4:]]), (1, LINES[:1])),
        *((9, [*LINES[:8], "other"]), (9, [*LINES, "one more"])),
    ],
)
def test_a_resumed_run_with_another_input(first, lines, embedded, interrupted, tmp_path):
    with refused(rf"v.hdf5.unfinished has other lines {first} to \d."):
        embedded(input=write_lines(tmp_path / "other.txt", lines))


@pytest.mark.parametrize("name", ["output.hdf5", "progress.npz"])
@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_folder(name, size, embedded, interrupted):
    file = Path(f"{interrupted}.unfinished", name)
    file.write_bytes(file.read_bytes()[:size])
    with refused("v.hdf5.unfinished is damaged. Remove it"):
        embedded()


def test_blocks_reach_the_disk_before_the_progress_says_so(embedded, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino) or fsync(number))
    replace, replaced = os.replace, []
    path_replace = Path.replace

    def noted(old, new):
        replaced.append((Path(new).name, Path(old).stat().st_ino, len(synced)))
        return path_replace(old, new)

    monkeypatch.setattr(Path, "replace", noted)
    path = embedded(batch_tokens=4)
    names = [name for name, _, _ in replaced]
    assert names == ["settings.json", *["progress.npz"] * 4, "v.hdf5"] and replace is os.replace
    before = 0
    for _, file, number in replaced:
        assert {file, path.stat().st_ino} <= {*synced[before:number]}
        before = number


@pytest.mark.parametrize("name", ["v.hdf5", "v.parquet"])
def test_a_full_disk(name, embedded, tmp_path, monkeypatch):
    """The error names the file, and the same command continues."""
    expected = embedded(f"whole.{name}", batch_tokens=4).read_bytes()
    savez, calls = np.savez, count()

    def full(*arguments, **arrays):
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as numpy: without the name of the file
        savez(*arguments, **arrays)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"No space left on device: .*{name}"):
        patch.setattr(np, "savez", full)
        embedded(name, batch_tokens=4)
    assert len(np.load(tmp_path / f"{name}.unfinished" / "progress.npz")["ends"]) == 2
    assert embedded(name, batch_tokens=4).read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".hdf5", ".parquet"])
def test_a_run_that_is_killed_while_it_writes(suffix, model_dir, long_corpus, embedded, tmp_path):
    """SIGKILL in the middle of blocks, after some of their bytes are in the file; then the same command."""
    expected = embedded(f"one{suffix}", input=long_corpus, batch_tokens=32).read_bytes()
    output = tmp_path / f"killed{suffix}"
    flags = arguments_of({"model": model_dir, "output": output, "input": long_corpus, "batch_tokens": 32})
    for writes in (1, 40, 100, None):
        code = KILLED_AFTER.format(writes=writes, flags=flags)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        if writes is not None:
            assert run.returncode == -signal.SIGKILL, run.stderr
            assert not output.exists()
    assert run.returncode == 0, run.stderr
    assert output.read_bytes() == expected and not Path(f"{output}.unfinished").exists()


# A run that is killed after a number of writes of vectors: half of the bytes of the last one are in the file.
KILLED_AFTER = """
import os, signal
import numpy as np
from modeling_elmo.run_scripts import embed
from modeling_elmo.run_scripts.vectors import outputs

left = {writes}

def die(path, end):
    with open(path, "rb+") as file:
        file.seek(end)
        file.write(b"half of a block")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

for writer in (outputs.HDF5Writer, outputs.ParquetWriter):
    def write(self, path, first, block, end, write=writer.write):
        global left
        if left is not None and (left := left - len(block.lines)) <= 0:
            write(self, path, first, block._replace(vectors=[[a + 1 for a in each] for each in block.vectors]), end)
            die(path, end) if isinstance(self, outputs.ParquetWriter) else os.kill(os.getpid(), signal.SIGKILL)
        return write(self, path, first, block, end)
    writer.write = write
embed.main({flags!r})
"""


# Several processes


MODULE = ("-m", "modeling_elmo.run_scripts.embed")


def num_blocks(output):
    """Of the folder, which may go away meanwhile."""
    with suppress(OSError), np.load(f"{output}.unfinished/progress.npz") as progress:
        return len(progress["ends"])
    return 0


@pytest.fixture
def of_one_process(embedded, long_corpus):
    return embedded("one.hdf5", input=long_corpus, batch_tokens=32).read_bytes()


def with_children(launchers):
    """The launchers that still run, and their processes."""
    found = []
    for each in launchers:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found += [psutil.Process(each.pid), *psutil.Process(each.pid).children()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_process_of_two_machines_may_be_killed_at_any_moment(
    model_dir, long_corpus, of_one_process, tmp_path, seed
):
    """Also the main process and the launchers. Each machine has two processes, and one is killed each time."""
    random, output = np.random.default_rng(seed), tmp_path / "killed.hdf5"
    flags = arguments_of({"model": model_dir, "output": output, "input": long_corpus, "batch_tokens": 32})
    for wanted in (*sorted(random.integers(0, 40, 4)), None):
        machines = [torchrun(launcher, *MODULE, *flags) for launcher in two_machines(2)]
        while wanted is not None and num_blocks(output) < wanted and all(each.poll() is None for each in machines):
            time.sleep(0.002)
        if wanted is not None:
            time.sleep(random.uniform(0, 0.1))
            everyone = with_children(machines)
            everyone[random.integers(len(everyone))].kill()
            _, others = psutil.wait_procs(everyone, timeout=15)
            for each in others:  # launchers wait for each other for a quarter of an hour
                each.kill()
        messages = [each.communicate(timeout=120)[1] for each in machines]
        if output.exists():
            break
    assert output.read_bytes() == of_one_process, messages
    assert num_blocks(output) == 0


def test_processes_that_do_not_fit_together(tmp_path):
    main, other = (outputs.UnfinishedOutput(tmp_path / "v.hdf5", None, {"weights": each}, 16) for each in (0, 1))
    with refused("v.hdf5.unfinished has other settings: weights 0, now 1"):
        other.follow(main)
    other.settings = main.settings
    with refused("v.hdf5: not all machines find .*unfinished. Pass a shared path", FileNotFoundError):
        other.follow(main)


def test_processes_that_read_different_lines(embedded, monkeypatch):
    monkeypatch.setattr(embed, "values_of_all", lambda value, _: [value, value[1:] if type(value) is list else value])
    with refused("The processes read different lines"):
        embedded(batch_tokens=4)


def test_an_input_that_changes_during_the_run(embedded, tmp_path, monkeypatch):
    begin = outputs.UnfinishedOutput.begin

    def change(*arguments):
        begin(*arguments)
        write_lines(tmp_path / "corpus.txt", [*LINES[:-1], "They play"])

    monkeypatch.setattr(outputs.UnfinishedOutput, "begin", change)
    with refused("Lines from 9 on have changed since this run began"):
        embedded(batch_tokens=4)


# Several files


@pytest.mark.parametrize("suffix", [".hdf5", ".parquet"])
@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_several_files_and_their_places(embedded, alone, tmp_path, suffix, pooling):
    """The entries of the files follow each other; the output names file and line of each."""
    write_lines(tmp_path / "a.txt", ["the cat", "", "sat"])
    write_lines(tmp_path / "b.txt", ["on"])
    write_lines(tmp_path / "c.tsv", ["year\ttext", "1900\tthe mat"])
    path = embedded(f"v{suffix}", input=[tmp_path / "?.txt", tmp_path / "c.tsv"], layers="top", pooling=pooling)
    expected = [("a.txt", 1), ("a.txt", 2), ("a.txt", 3), ("b.txt", 1), ("c.tsv", 2)]
    expected = [(str(tmp_path / name), number) for name, number in expected]
    texts = ["the cat", "", "sat", "on", "the mat"]
    if suffix == ".parquet":
        table = read_table(path)
        assert table.column_names == ["file", "line", "text", "tokens", "vectors", "year"] and table["text"][:] == texts
        assert list(zip(table["file"], table["line"], strict=True)) == expected
        found = read(path)
    else:
        with h5py.File(path) as file:
            assert list(zip(file["files"].asstr()[:], file["lines"][:].tolist(), strict=True)) == expected
            found = list(file["sentence_vectors"]) if pooling == "mean" else [file[str(n)][:] for n in range(5)]
    assert_close(found, alone([text.split() for text in texts], "top", pooling), 1e-5)


def test_sentences_and_their_places(embedded, tmp_path):
    pytest.importorskip("sentencex")
    text = write_lines(tmp_path / "a.txt", ["The cat sat", "on it. The", "mat is", "", "here. So"])
    with h5py.File(embedded(input=text, split_sentences="en")) as file:
        found = json.loads(file["sentence_to_index"][0])
        assert found == {"The cat sat on it.": "0", "The mat is": "1", "here.": "2", "So": "3"}
        assert file["lines"][:].tolist() == [1, 2, 5, 5] and {*file["files"].asstr()} == {str(text)}
        assert [file[str(number)].shape[1] for number in range(4)] == [5, 3, 1, 1]
    folder = tmp_path / "data"
    datasets.Dataset.from_dict({"text": ["One goes. Two", "Three."]}).save_to_disk(folder)
    table = read_table(embedded("d.parquet", dataset=folder, split_sentences="en"))
    assert table["text"][:] == ["One goes.", "Two", "Three."] and table["line"][:] == [0, 0, 1]
    assert table["file"][:] == [str(folder)] * 3


def test_fasta_files_with_equal_names(embedded, tmp_path):
    inputs = [
        write_lines(tmp_path / "a.fasta", [">x/1", "MK"]),
        write_lines(tmp_path / "b.fa", [">x_1", "MK"]),
    ]
    with refused(r"b\.fa: .*a\.fasta has the name 'x_1' too \(/ is _\); change it"):
        embedded(input=inputs)
    write_lines(tmp_path / "b.fa", [">y", "M"])
    with h5py.File(embedded(input=inputs, layers="top")) as file:
        assert {name: len(file[name]) for name in file} == {"x_1": 2, "y": 1}
    with refused("FASTA files, whose records have names, and texts"):
        embedded("w.hdf5", input=[*inputs, write_lines(tmp_path / "c.txt", ["the cat"])])


# Mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"input": None}, "--input FILE ... or --dataset NAME"),
        ({"input": "c.json.gz"}, "c.json.gz: text is read from .txt, and from .jsonl"),
        ({"input": "c.docx"}, "c.docx: unknown suffix '.docx'; .* .txt, .jsonl.*.conllu, .fasta, .*.gz or .zst"),
        ({"input": "absent.txt"}, "absent.txt: no file found"),
        ({"input": "p.fasta", "raw_text": True}, "p.fasta has sequences.*--raw_text"),
        ({"raw_text": True, "unit": "character"}, "--raw_text .* --unit character"),
        ({"output": "v.npz"}, "v.npz: unknown suffix '.npz'; .* .hdf5, .h5, .parquet"),
        ({"output": "c.hdf5"}, "c.hdf5 exists"),
        ({"input": "empty.txt"}, "empty.txt is empty"),
        ({"input": "number.jsonl"}, r"number.jsonl, line 1: the sentence is \['a', 1\]"),
        ({"batch_size": 3}, "--batch_size 3 needs --stateful"),
        ({"stateful": True, "batch_tokens": 8}, "--batch_tokens 8 has no effect with --stateful, .* --batch_size"),
    ],
)
def test_mistakes(embedded, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for name in ("c.hdf5", "c.docx", "c.json.gz", "empty.txt"):
        Path(name).touch()
    write_lines(Path("p.fasta"), [">a", "M"])
    write_lines(Path("number.jsonl"), ['{"text": ["a", 1]}'])
    with refused(message, (ValueError, OSError)):
        embedded(**options)
    assert not list(tmp_path.glob("*.unfinished")) and not Path("v.hdf5").exists()


@pytest.mark.parametrize("layers, is_computed", [("all", False), ("sum", False), ("mixed", True)])
def test_a_mix_that_is_not_written_is_not_computed(layers, is_computed, embedded, monkeypatch):
    mix = MagicMock(side_effect=ScalarMix.forward)
    monkeypatch.setattr(ScalarMix, "forward", lambda *inputs: mix(*inputs))
    embedded(layers=layers)
    assert mix.called is is_computed


def test_an_untrained_mix_is_told(embedded, tmp_path, caplog):
    folder = save_model(tmp_path / "m", ELMoForPreTraining(tiny()))
    found = [read(embedded(f"{name}.h5", folder, layers=name)) for name in ("mixed", "average")]
    assert_close(*found)
    assert "was never trained: the vectors are the average of the layers" in caplog.text


def test_a_mix_that_normalizes_over_the_batch_gets_lines_alone(embedded, tmp_path, caplog):
    torch.manual_seed(0)
    model = ELMoModel(tiny(scalar_mix_layer_norm="allennlp")).eval()
    folder = save_model(tmp_path / "m", model)
    for number in range(2):  # two models, each with several batches
        caplog.clear()
        found = read(embedded(f"{number}.hdf5", folder, layers="mixed", batch_tokens=8))
        assert ["so each line is one" in message for message in caplog.messages].count(True) == 1
    with torch.no_grad():
        one = model(**ELMoTokenizer()([WORDS[0]], is_split_into_words=True, return_tensors="pt")).elmo_embeddings
    assert_close([found[0]], [one[0, 1:-1].numpy()])


def test_a_model_without_all_weights_is_refused(embedded, tmp_path):
    model, folder = ELMoModel(tiny()), tmp_path / "half"
    weights = {name: tensor for name, tensor in model.state_dict().items() if "highways" not in name}
    model.save_pretrained(folder, state_dict=weights)
    missing = r"half lacks weights: .*char_encoder\.highways\.0\.carry\.bias"
    with refused(missing):
        embedded(model=folder)
    for read_model in (load_pretrained, load_for_export):
        with refused(missing):
            read_model(ELMoForPreTraining, folder)


def test_missing_extras_are_named(embedded, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with refused(r'needs h5py: pip install "modeling-elmo\[convert\]"', ImportError):
        embedded(model="m")


# States that run on


def one_after_the_other(loaded, sentences: list[list[str]]):
    """All layers of each sentence, where both directions read the sentences as one text, without states.

    The backward direction reads the last word of the next sentence after the first word of the one before.
    """
    model, tokenizer = loaded
    inputs = [tokenizer([each], is_split_into_words=True, return_tensors="pt") for each in sentences]
    lengths, halves = [each["input_ids"].shape[1] for each in inputs], []
    for order in (1, -1):
        characters = torch.cat([each["character_ids"] for each in inputs[::order]], dim=1)
        with torch.no_grad():
            layers = torch.stack(model(character_ids=characters).hidden_states)[:, 0]
        parts = layers.split(lengths[::order], dim=1)[::order]
        halves.append([part.chunk(2, dim=-1)[order < 0] for part in parts])
    return [torch.cat(pair, -1)[:, 1:-1].numpy() for pair in zip(*halves, strict=True)]


STREAM = ["one two", "a b c d", "", "x", "the play was staged", "they play", "y z", "last"]


@pytest.fixture
def stream(tmp_path):
    return write_lines(tmp_path / "stream.txt", STREAM)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 64])
def test_states_run_on_from_batch_to_batch(batch_size, embedded, loaded, stream):
    """Also past a smaller batch; and a run that was interrupted continues them."""
    found = read(embedded(input=stream, stateful=True, batch_size=batch_size))
    expected = [None] * len(STREAM)
    for row in range(min(batch_size, len(STREAM))):
        sentences = [line.split() for line in STREAM[row::batch_size]]
        expected[row::batch_size] = one_after_the_other(loaded, sentences)
    assert_close(found, expected)


def test_an_interruption_keeps_the_states(embedded, stream, monkeypatch):
    options = {"input": stream, "stateful": True, "batch_size": 2}
    whole = embedded("whole.hdf5", **options).read_bytes()
    computed, blocks = embed.compute_block, []

    def stopped(block, *arguments):
        blocks.append(block.lines)
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return computed(block, *arguments)

    monkeypatch.setattr(embed, "compute_block", stopped)
    with pytest.raises(KeyboardInterrupt):
        embedded(**options)
    assert embedded(**options).read_bytes() == whole
    assert [len(lines) for lines in blocks] == [2] * 5  # two before, the one that was stopped, two after


def test_files_of_allennlps_embedder(embedded, tmp_path):
    """Its `ElmoEmbedder` wrote ten batches of three sentences."""
    folder = ELMO_FIXTURES / "allennlp"
    weights, options = folder / "lm_weights.hdf5", folder / "options.json"
    model = convert_checkpoint(OriginalCheckpoint, weights, tmp_path / "model", "whitespace", options=options)
    lists = read_json(folder / "sentences.json")
    lines = [sentence for batch in zip(*lists, strict=True) for sentence in batch]
    run = partial(embedded, model=model, input=write_lines(tmp_path / "c.txt", lines), layers="top")
    stateful = read(run("on.hdf5", stateful=True, batch_size=3))
    stateless = read(run("off.hdf5"))
    expected = []
    for batch in range(10):
        for number in range(3):
            with h5py.File(folder / f"lm_embeddings_{number}.hdf5") as file:
                expected.append(np.concatenate(file[str(batch)][()], -1))
    assert_close(stateful, expected)
    assert min(np.abs(found - wanted).max() for found, wanted in zip(stateless[3:], expected[3:], strict=True)) > 1
