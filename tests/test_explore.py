"""`elmo explore`: what it shows against the models themselves, the page through its API, what it does not serve."""

import math
import re
import runpy
import socket
import sys
import threading
import time
from dataclasses import replace
from importlib.util import module_from_spec

import httpx
import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from bilm_models import make_tokenizer, save, tiny_model
from errors import refused
from golden import check_golden
from numpy.testing import assert_allclose
from places import FIXTURES, ROOT
from sklearn.decomposition import PCA
from transformers import pipeline

from modeling_elmo import (
    ELMoForCoreferenceResolution,
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForSemanticRoleLabeling,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoTokenizer,
)
from modeling_elmo.run_scripts import explore
from modeling_elmo.run_scripts.explorer import readings
from modeling_elmo.run_scripts.pretraining.corpus import Corpus

ENGLISH, KOREAN = (str(ROOT / "model_cards" / f"elmo-small-{language}") for language in ("en", "ko"))
PLAY = FIXTURES / "demo" / "play.txt"
TEXT = "The play was a success.\n\n  They play chess. \nA play, then."
LINES = ["The play was a success.", "They play chess.", "A play, then."]
STORY = "Ada wrote it, in 1843.\nShe knew Mr. Babbage."
HEADS = {
    "tagger": (ELMoForTokenClassification, {"id2label": dict(enumerate(["O", "B-X", "I-X"]))}),
    "parts-of-speech": (ELMoForTokenClassification, {"id2label": dict(enumerate(["NOUN", "VERB"])), "head": "linear"}),
    "labeler": (
        ELMoForSemanticRoleLabeling,
        {"id2label": dict(enumerate(["O", "B-V", "B-ARG0", "I-ARG0"])), "task_num_layers": 2},
    ),
    "reader": (ELMoForQuestionAnswering, {}),
    "classifier": (ELMoForSequenceClassification, {"id2label": dict(enumerate(["bad", "good", "odd"]))}),
    "comparer": (ELMoForSequenceClassification, {"classifier": "esim"}),
    "resolver": (ELMoForCoreferenceResolution, {"max_span_width": 3, "train_singletons": True}),
}


@pytest.fixture(scope="module")
def english():
    return readings.open_model(ENGLISH)


@pytest.fixture(scope="module")
def plain_english():
    return ELMoForPreTraining.from_pretrained(ENGLISH).eval(), ELMoTokenizer.from_pretrained(ENGLISH)


@pytest.fixture(scope="module")
def page():
    return pytest.importorskip("modeling_elmo.run_scripts.explorer.page", exc_type=ImportError)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "play.txt"
    file.write_text("".join(PLAY.read_text("utf-8").splitlines(keepends=True)[:25]), "utf-8")
    return str(file)


@pytest.fixture(scope="module")
def head_folders(tmp_path_factory):
    """Small random heads of every task."""
    root = tmp_path_factory.mktemp("heads")
    tokenizer = make_tokenizer()
    for name, (cls, options) in HEADS.items():
        model = tiny_model(cls, vocab_size=len(tokenizer), task_hidden_size=6, **options)
        for key, parameter in model.named_parameters():
            if not key.startswith("elmo."):
                torch.nn.init.normal_(parameter, std=0.3 if name == "resolver" else 0.7)
        save(root / name, model, tokenizer)
    return {name: str(root / name) for name in HEADS}


@torch.no_grad()
def layers_of(model, tokenizer, text):
    """Shape: `(layers, words, dim)`, of a text by itself."""
    given = {"is_split_into_words": not isinstance(text, str)}
    output = getattr(model, "elmo", model)(**tokenizer([text], return_tensors="pt", **given))
    return torch.stack(output.hidden_states)[:, 0, 1:-1]


def test_cosines_are_those_of_the_model(english, plain_english):
    expected = [layers_of(*plain_english, line) for line in LINES]
    found = readings.layer_cosines(english, TEXT, "play (2)")
    chosen = expected[1][:, 1]
    assert [words for words, _ in found] == [line.replace(".", " .").replace(",", " ,").split() for line in LINES]
    for (_, cosines), layers in zip(found, expected, strict=True):
        wanted = torch.cosine_similarity(layers, chosen[:, None], dim=-1)
        assert_allclose(cosines, wanted, atol=1e-5)
    assert found[1][1][:, 1] == pytest.approx(1, abs=1e-5) and found[0][1][0, 1] == pytest.approx(1, abs=1e-5)
    assert found[0][1][2, 1] < 0.9  # in the top layer, a play on a stage is not what chess players do


def test_words_have_names(english):
    names, first = readings.words_to_choose(english, TEXT)
    wanted = "The|play|was|a|success|.|They|play (2)|chess|. (2)|A|play (3)|,|then|. (3)"
    assert "|".join(names) == wanted and first == "play"  # as frequent as the full stop, and longer


def test_a_corpus_with_letters_in_parts_has_uses_of_composed_words(english, tmp_path):
    file = tmp_path / "parts.txt"
    file.write_text("A cafe\u0301 is open .\nThe tea was cold .\n", "utf-8")
    found = readings.similar_uses(english, "They like the caf\u00e9 .", "caf\u00e9", 2, Corpus.from_files([str(file)]))
    assert [use.words[use.position] for use in found.uses] == ["caf\u00e9", "cafe\u0301"]


def test_nearest_uses_are_those_of_plain_cosines(english, plain_english, corpus):
    found = readings.similar_uses(english, TEXT, "play (2)", 1, Corpus.from_files([corpus]))
    assert found.query == 1 and len(found.uses) > 25 and len(found.nearest) == readings.SHOWN_USES
    assert {use.words[use.position].lower() for use in found.uses} == {"play"}
    vectors = torch.stack([layers_of(*plain_english, list(use.words))[1, use.position] for use in found.uses]).numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors[1]
    order = [row for row in np.argsort(-cosines, kind="stable") if found.uses[row].words is not found.uses[1].words]
    wanted = cosines[order[: readings.SHOWN_USES]]
    assert_allclose([cosine for _, cosine in found.nearest], wanted, atol=1e-4)
    assert_allclose(cosines[[near for near, _ in found.nearest]], wanted, atol=1e-4)
    plane = PCA(2).fit(vectors)
    assert_allclose(found.shares, plane.explained_variance_ratio_, atol=1e-4)
    assert_allclose(np.abs(found.points), np.abs(plane.transform(vectors)), atol=1e-3)  # up to their signs


@torch.no_grad()
def test_expectations_are_those_of_the_softmax(english, plain_english):
    """The top layer's two halves, through torch's adaptive softmax, shifted by hand."""
    model, tokenizer = plain_english
    found = readings.expectations(english, TEXT)
    assert [[each.word for each in line] for line in found] == [tokenizer.splitter.words(line) for line in LINES]
    for line, row in zip(LINES, found, strict=True):
        encoding = tokenizer([line], return_tensors="pt")
        forward, backward = model.elmo(**encoding).last_hidden_state[0].chunk(2, dim=-1)
        ways = []
        for hidden in (forward[:-2], backward[2:]):  # the state before each word, and the state after it
            ways.append(F.pad(model.softmax.adaptive.log_prob(hidden), (1, 0), value=-torch.inf))  # no <PAD>
        ids = encoding["input_ids"][0, 1:-1, None]
        for log_probs, shown in zip(ways, ("forward_bits", "backward_bits"), strict=True):
            bits = [getattr(each, shown) for each in row]
            assert_allclose(bits, -log_probs.gather(1, ids)[:, 0] / math.log(2), atol=1e-3)
        ways.append((ways[0] + ways[1]).log_softmax(-1))
        for log_probs, shown in zip(ways, ("forward", "backward", "both"), strict=True):
            values, words = log_probs.topk(readings.SHOWN_PREDICTIONS)
            guesses = [getattr(each, shown) for each in row]
            assert_allclose([[guess.log_prob for guess in each] for each in guesses], values, atol=1e-3)
            assert [[guess.word for guess in each] for each in guesses] == [
                tokenizer.convert_ids_to_tokens(each.tolist()) for each in words
            ]
    assert [each.token for each in readings.expectations(english, "It won’t “ xyzzyq —")[0]] == [
        *("It", "wo", "n't", '"', "<UNK>", "--")
    ]


# What heads find, against their pipelines


def opened_head(folder):
    opened = readings.open_model(folder)
    return opened, pipeline(opened.task, opened.model, tokenizer=opened.tokenizer)


def test_entities(head_folders):
    opened, tag = opened_head(head_folders["tagger"])
    lines = tag(STORY.split("\n"), aggregation_strategy="simple")
    found = readings.head_pieces(opened, STORY)
    assert "".join(text for text, _ in found) == STORY
    spans = [(text.replace(" ", ""), label) for text, label in found if label]
    assert spans == [(each["word"].replace(" ", ""), each["entity_group"]) for line in lines for each in line]
    opened = readings.open_model(head_folders["parts-of-speech"])  # whose words stay apart
    labeled = [text for text, label in readings.head_pieces(opened, STORY) if label]
    assert labeled == opened.tokenizer.splitter.words(STORY)


def test_roles(head_folders):
    opened, label = opened_head(head_folders["labeler"])
    found = readings.head_pieces(opened, STORY)
    wanted = []
    for line in STORY.split("\n"):
        wanted += [verb["description"] for verb in label(line)["verbs"]] or [f"{line} (no predicate)"]
    shown = "".join(text if role is None else f"[{role}: {text.strip()}] " for text, role in found)
    assert [line.strip() for line in shown.strip().split("\n")] == wanted and "[V: " in shown
    with refused("101 words.* up to 100"):  # each may be a predicate
        readings.head_pieces(opened, "It rained.\n" + "word " * 101)


def test_answers(head_folders):
    opened, ask = opened_head(head_folders["reader"])
    answer = ask(question="Who wrote it?", context=STORY)
    span = answer["start"], answer["end"], f"{answer['score']:.0%}"
    assert readings.head_pieces(opened, STORY, question="Who wrote\nit?") == readings.pieces(STORY, [span])


@pytest.mark.parametrize("second", [" ", "It rained."])
def test_classes(second, head_folders):
    opened, classify = opened_head(head_folders["classifier"])
    wanted = []
    for line in STORY.split("\n"):
        best = classify({"text": line, "text_pair": second} if second.strip() else {"text": line})
        wanted.append((line, f"{best['label']} {best['score']:.0%}"))
    assert readings.head_pieces(opened, STORY, second=second) == [wanted[0], ("\n", None), wanted[1]]


def test_clusters(head_folders):
    opened, resolve = opened_head(head_folders["resolver"])
    clusters = resolve(STORY.split("\n"))["clusters"]
    spans = [(each["start"], each["end"], str(n)) for n, mentions in enumerate(clusters, 1) for each in mentions]
    assert spans and readings.head_pieces(opened, STORY) == readings.pieces(STORY, spans)


def test_pieces_of_nested_spans():
    spans = [(0, 26, "1"), (12, 26, "2"), (12, 18, "3"), (26, 28, "4")]
    wanted = [("the wife of ", "1"), ("Emma's", "3"), (" brother", "2"), (" l", "4"), ("eft", None)]
    assert readings.pieces("the wife of Emma's brother left", spans) == wanted
    assert readings.pieces("", []) == []


def test_other_mistakes(english, tmp_path, monkeypatch):
    with refused("elmo-small-en .*'chess'"):
        readings.layer_cosines(english, "A play.", "chess")
    (tmp_path / "config.json").write_text('{"model_type": "elmo", "architectures": ["BertModel"]}')
    with refused("BertModel.*ELMoForPreTraining"):
        readings.open_model(str(tmp_path))
    for module, received in (("gradio", r"modeling-elmo\[explore\]"), (f"{readings.__package__}.page", "page halted")):
        with monkeypatch.context() as patch, pytest.raises(ImportError, match=received):
            patch.setitem(sys.modules, module, None)
            explore.main([ENGLISH])


# The page


def test_what_the_page_shows(english, page, monkeypatch):
    """Texts are escaped, lines after the first are folded, and each kind of label has a color."""
    evil = '<img/src="x"/onerror=alert(1)>'
    lines = [([evil], np.full((3, 1), cosine)) for cosine in (1.0, 0.5, -0.25)]
    names = [[f"{evil} ({number})"] for number in (1, 2, 3)]
    pieces = [(evil, "A"), (" met ", None), ("him", evil), ("her", "A")]
    monkeypatch.setattr(page, "OPEN_LINES", 1)
    monkeypatch.setattr(readings, "head_pieces", lambda *inputs: pieces if inputs[1] else [("She left.", None)])
    shown = [
        page.model_line(replace(english, name=evil)),
        page.cosine_lines(english.layers, lines, names, names[-1][0]),
        page.marked_text(english, "text"),
        page.marked_text(english, ""),
        page.share_bars(evil, english.layers, [0.2, 0.5, 0.3], 1.25),
    ]
    check_golden("\n".join(shown).replace("<div", "\n<div") + "\n", "explorer.html")
    assert "<img" not in page.uses_of(english, f"a play {evil}\nplay {evil}", "play", 2, None)[1]


def test_a_word_in_other_signs_is_known_and_found_among_the_guesses(english, page):
    text = "She said , “ I do n’t know xyzzyq . ” <img/src>"
    shown = re.sub("[\u2068\u2069]", "", page.expectation_lines(english, text))
    assert "n’t</td>" in shown and "[n&#x27;t]" in shown and "xyzzyq*" in shown and "n’t*" not in shown
    assert "<img" not in shown
    assert page.language_of(english, ["“ — … ”", "It xyzzyq", "xyzzyq"]) == "“ — … ”"


@pytest.fixture(scope="module")
def served(page, head_folders, corpus):
    """The page of the program, with a biLM of each language and every head, and a client of its API."""
    client = pytest.importorskip("gradio_client")
    pages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            page.gr.Blocks, "block_thread", lambda launched: pages.append(launched)
        )  # it would wait for Ctrl-C
        patch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")  # the page stays on this computer all the same
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")  # no one answers, and no one is asked
        patch.setenv("no_proxy", "example.org")
        explore.main([ENGLISH, KOREAN, *head_folders.values(), "--corpus", corpus])
        yield pages[0], client.Client(pages[0].local_url, verbose=False, analytics_enabled=False)
        pages[0].close()


def test_the_page_answers_as_the_readings(served, page, english, corpus):
    launched, client = served
    assert tabs_of(launched) == ["Uses of a word", "What the model expects", "Heads", "Layer weights"]
    chosen, *first = client.predict(TEXT, 2, api_name="/words")
    assert chosen["value"] == "play" and 'data-word="play" aria-pressed="true"' in first[0]
    cosines, table, points, caption, *korean = client.predict(TEXT, "play (2)", 2, api_name="/uses")
    wanted = page.uses_of(english, TEXT, "play (2)", 2, Corpus.from_files([corpus]))
    assert [cosines, caption] == [wanted[0], wanted[3]] and "play" in korean[0] and points["visible"]
    found = readings.similar_uses(english, TEXT, "play (2)", 2, Corpus.from_files([corpus]))
    assert re.findall(r"<td[^>]*>(-?\d\.\d\d)</td>", table) == [f"{cosine:.2f}" for _, cosine in found.nearest]
    (line,) = readings.expectations(english, "They play chess.")
    bits = np.mean([word.forward_bits for word in line])
    assert f"{bits:.1f} bits given the words before" in client.predict("They play chess.", api_name="/expectations")


def tabs_of(page):
    return [each.label for each in page.blocks.values() if type(each).__name__ == "Tab"]


def test_the_first_texts_of_the_page_fit_its_heads(served, page, head_folders):
    """The components' first values are what the browser sends."""
    launched, client = served
    boxes = [each["props"] for each in launched.get_config_file()["components"] if each["type"] == "textbox"]
    sent = [box["value"] for box in boxes[-3:]]
    for number in range(len(head_folders)):
        assert 'class="elmo-text">' in client.predict(*sent, api_name=f"/head_{number + 1}")
    shown = client.predict(*sent[:2], None, api_name=f"/head_{1 + [*HEADS].index('comparer')}")
    assert "There is no second text yet" in shown
    assert tabs_of(page.build_page([head_folders["reader"]])) == ["Heads", "Layer weights"]


HOSTS = {"127.0.0.1": True, "LocalHost:7860": True, "[::1]:7860": True, "127.0.0.1.evil.example:7860": False}
HOSTS |= {"evil.localhost": False, "0.0.0.0": False, "": False}


@pytest.mark.parametrize("host, is_local", HOSTS.items())
def test_the_page_is_served_under_local_names_only(served, host, is_local):
    """Otherwise a page of another site, whose name leads to this computer, could read the corpus."""
    for path in ("", "nothing", "gradio_api/info", "gradio_api/queue/data"):
        with httpx.stream("GET", f"{served[0].local_url}{path}", headers={"Host": host}) as answer:
            assert (answer.status_code == 400) != is_local, path
    answer = httpx.post(f"{served[0].local_url}gradio_api/queue/join", headers={"Host": host})
    assert (answer.text == "Invalid host header") != is_local


def test_a_space_is_served_under_its_names(page, monkeypatch):
    monkeypatch.setenv("SYSTEM", "spaces")
    monkeypatch.setenv("SPACE_ID", "user/explorer")
    of_space = module_from_spec(page.__spec__)  # a new one: the variables are read when it is imported
    page.__spec__.loader.exec_module(of_space)
    assert "*" in of_space.LAUNCH_OPTIONS["app_kwargs"]["middleware"][0].kwargs["allowed_hosts"]


def test_the_models_answer_one_question_at_a_time(served, monkeypatch):
    page, client = served
    busy, read = threading.Lock(), readings.lines_of

    def read_slowly(*inputs):
        assert busy.acquire(blocking=False), "two questions at a time"
        time.sleep(0.1)
        busy.release()
        return read(*inputs)

    monkeypatch.setattr(readings, "lines_of", read_slowly)
    asked = (("/words", TEXT, 2), ("/expectations", TEXT), ("/head_1", TEXT, "", ""), ("/head_3", TEXT, "", "")) * 2
    jobs = [client.submit(*inputs, api_name=name) for name, *inputs in asked]
    assert all(job.result() for job in jobs)
    for path in ("run/words", "api/words"):  # these would pass the queue
        answer = httpx.post(f"{page.local_url}gradio_api/{path}", json={"data": [TEXT], "fn_index": 0})
        assert answer.status_code == 404 and "join the queue" in answer.text


@pytest.mark.parametrize(
    "name, inputs, received",
    [
        ("/words", ["", 2], "no text"),
        ("/expectations", ["a " * 1500], "3,000 .*2,000"),
        ("/head_4", [STORY, None, None], "no question"),
        ("/uses", [TEXT, "play", None], "No word or no layer"),
        ("/uses", [TEXT, "gioca", 2], "reads no word &#x27;gioca&#x27;"),
    ],
)
def test_errors_of_the_page_are_messages(name, inputs, received, served, capfd):
    shown = str(served[1].predict(*inputs, api_name=name))
    assert re.search(f'class="elmo-note">.*{received}', shown)
    assert "<div" not in shown.partition("elmo-small-ko")[0]  # the old result goes
    assert "Traceback" not in capfd.readouterr().err  # the terminal of the server


def test_the_page_is_served_on_this_computer_only_and_no_file_is(served, corpus):
    page, _ = served
    port = int(page.local_url.rstrip("/").rpartition(":")[2])
    listening = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == port}
    assert listening == {"127.0.0.1"} and page.share_url is None
    for path in ("/etc/hostname", corpus, f"{ENGLISH}/config.json", "../README.md"):
        answer = httpx.get(f"{page.local_url}gradio_api/file={path}")
        assert answer.status_code in (403, 404), path
    answer = httpx.post(f"{page.local_url}gradio_api/upload", files={"files": ("a.txt", b"a")})
    assert answer.status_code == 413
    assert httpx.get(page.local_url).status_code == 200  # the page itself is there
    assert not page.analytics_enabled and not page.run_history


@pytest.mark.parametrize("name, answered", [("127.0.0.2", [200, 200, 400]), ("0.0.0.0", [200, 200, 200])])
def test_the_page_under_a_name_that_others_reach(name, answered, page, monkeypatch, capsys):
    statuses = []

    def ask(launched):
        for host in ("localhost", "127.0.0.2", "elsewhere.example"):
            url = f"http://{name}:{launched.server_port}/config"
            statuses.append(httpx.get(url, headers={"Host": host}).status_code)
        launched.close()

    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(page.gr.Blocks, "block_thread", ask)
    explore.main([ENGLISH, "--server_name", name])
    assert statuses == answered and "Open http://" in capsys.readouterr().out


def test_a_space_runs(tmp_path, page, monkeypatch, capsys, corpus):
    folder = tmp_path / "space"
    explore.main([ENGLISH, "--corpus", corpus, "--space", str(folder)])
    assert f"hf upload USER/NAME {folder} --repo-type space" in capsys.readouterr().out
    copied = {path.name for path in (folder / "elmo-small-en").iterdir() if path.suffix != ".py"}
    assert copied == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(folder / "app.py"))
    assert tabs_of(names["demo"]) == ["Uses of a word", "What the model expects"]
    _, url, _ = names["demo"].launch(**names["LAUNCH_OPTIONS"], prevent_thread_lock=True, quiet=True)
    assert "ELMo explorer" in httpx.get(url).text
    names["demo"].close()
    with refused("is not empty", FileExistsError):
        explore.main([ENGLISH, "--space", str(folder)])


def test_files_of_a_space(tmp_path, page, monkeypatch, corpus):
    monkeypatch.setattr(explore, "check_model", lambda name: None)
    monkeypatch.setattr(explore, "__version__", "OURS")
    monkeypatch.setattr(explore, "version", lambda package: f"OF {package}")
    explore.write_space(tmp_path / "space", ["user/elmo", KOREAN], [corpus], trust_remote_code=True)
    files = [(tmp_path / "space" / name).read_text("utf-8") for name in explore.OWN_FILES]
    check_golden("\n".join(files), "space.txt")


def test_files_of_a_space_have_different_names(tmp_path):
    with refused("the name elmo-small-ko, "):
        explore.write_space(tmp_path / "space", [KOREAN, f"{KOREAN}/."])
    for name in explore.OWN_FILES:
        (tmp_path / name).write_text("We play .\n")
        with refused(f"the name {name}, "):
            explore.write_space(tmp_path / "space", [KOREAN], [str(tmp_path / name)])


@pytest.mark.parametrize("name, port", [("127.0.0.1", 70000), ("192.0.2.1", None), ("a" * 70, None)])
def test_an_address_that_cannot_be_opened(name, port):
    with refused(f"--server_name {name}, --port {port} cannot be opened"):
        explore.ExploreArguments(server_name=name, port=port)


def test_a_port_that_is_taken():
    with socket.create_server((explore.LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with refused(f"--port {port} cannot be opened"):
            explore.ExploreArguments(port=port)
