"""Running text in four languages: the help pages of LibreOffice and Debian's installation guide.

The four are translations of the same pages, so a page is on the same side of the split in every language: by page,
never by line, and one in ten each for validation and testing, chosen by a hash of the page's name. Many help pages
repeat paragraphs of others: a paragraph is kept on the first page that has it, so that no test page was trained on. One
that is word for word the same in several languages is code, or was never translated, and is left out.
"""

import json
from collections import Counter
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from coterie import draws
from coterie.data.dataset import Dataset
from coterie.data.sources import store, unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import PACKAGE, Form, Package, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.data.text import tokens
from coterie.errors import DataError

LANGUAGES = ("ca", "es", "de", "nl")
SPLITS = ("train", "validation", "test")
_GUIDE = "installation-guide-amd64"
_SHORTEST = 5  # words; what is shorter is a label
_BLOCKS = frozenset(("p", "h1", "h2", "h3", "h4", "h5", "h6", "dt"))
_SKIPPED = frozenset(("script", "style", "pre", "nav", "header", "footer", "aside", "noscript"))
_MENUS = frozenset(
    ("howtoget", "relatedtopics", "navheader", "navfooter", "toc", "bascode", "pycode", "programlisting")
)
_CODE = frozenset(("code", "codeintable", "related", "howtogetheader", "bug"))
_VOID = frozenset(("br", "img", "hr", "meta", "link", "input", "base", "col", "area", "wbr"))
# words that only one of the languages uses all the time; a paragraph with more of English than of its own is English
_WORDS = {
    "en": "the of and to is are for with this that you it or by from be can if on as your have not will",
    "ca": "el els les un una que amb per del dels al als és són aquest aquesta no si podeu es heu com o i de la",
    "es": "el los las un una que con para por del al es son este esta no si puede se como o y de la en",
    "de": "der die das und ist sind ein eine einen mit für von auf zu den dem sie wird werden nicht wenn im oder als",
    "nl": "de het een en van is zijn met voor op te dat u wordt worden niet als deze dit kan of om bij naar",
}
_MARKS = {language: frozenset(words.split()) for language, words in _WORDS.items()}


class _Page(HTMLParser):
    """The paragraphs of one page: inside `#DisplayArea` if it has one, without menus and code."""

    def __init__(self, area: bool) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._open: list[tuple[str, bool]] = []  # what is open, and whether it is to be skipped
        self._text: list[str] | None = None
        self._inside = not area

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """A paragraph begins, or something that is skipped."""
        if tag in _VOID:
            if tag == "br" and self._text is not None:
                self._text.append(" ")
            return
        told = dict(attributes)
        if not self._inside:
            if told.get("id") == "DisplayArea":
                self._inside, self._open = True, []
            return
        classes = (told.get("class") or "").split()
        skipped = (bool(self._open) and self._open[-1][1]) or tag in _SKIPPED or not _MENUS.isdisjoint(classes)
        skipped = skipped or (tag in _BLOCKS and not _CODE.isdisjoint(classes))
        self._open.append((tag, skipped))
        if tag in _BLOCKS and not skipped:
            self._end()
            self._text = []

    def handle_endtag(self, tag: str) -> None:
        """A paragraph ends; what was left open inside ends with it."""
        if not self._inside or tag in _VOID:
            return
        if tag not in (name for name, _ in self._open):
            if tag == "div" and not self._open:  # the end of the display area
                self._end()
                self._inside = False
                self._open = []
            return
        while True:
            name, _ = self._open.pop()
            if name in _BLOCKS:
                self._end()
            if name == tag:
                return

    def handle_data(self, text: str) -> None:
        """Words of a paragraph."""
        if self._text is not None and not (self._open and self._open[-1][1]):
            self._text.append(text)

    def _end(self) -> None:
        if self._text is not None and (text := " ".join("".join(self._text).split())):
            self.paragraphs.append(text)
        self._text = None


def foreign(paragraph: str, language: str) -> bool:
    """Whether a paragraph is English that nobody translated."""
    words = [word.strip(".,;:()«»\"'!?").lower() for word in paragraph.split()]
    english = sum(word in _MARKS["en"] for word in words)
    return english > sum(word in _MARKS[language] for word in words)


def clean(page: str, language: str) -> list[str]:
    """The paragraphs of one page that are running text: no labels, no paths through menus, nothing untranslated."""
    reader = _Page(area='id="DisplayArea"' in page)
    reader.feed(page)
    reader.close()
    whole = (text for text in reader.paragraphs if len(text.split()) >= _SHORTEST and "▸" not in text)
    return [text for text in whole if not foreign(text, language)]


def side(page: str) -> str:
    """The split a page belongs to, in every language the same."""
    return {8: "validation", 9: "test"}.get(draws.name(f"page/{page}") % 10, "train")


def _pages(folder: Path, archive: str, language: str) -> dict[str, list[str]]:
    """Paragraphs of pages by a name that is the same in every language."""
    marks = (f"/help/{language}/text/", f"/{_GUIDE}/{language}/")

    def wanted(path: str) -> bool:
        return path.endswith(".html") and any(mark in f"/{path}" for mark in marks)

    found = {}
    for path, content in unpack.contents(folder, archive, wanted):
        mark = next(mark for mark in marks if mark in f"/{path}")
        kind = "help" if mark == marks[0] else "guide"
        found[f"{kind}/{f'/{path}'.split(mark, 1)[1]}"] = clean(content.decode("utf-8", "replace"), language)
    return found


def _once(pages: dict[str, list[str]], left_out: set[str]) -> dict[str, str]:
    """Every paragraph on the first page that has it only; pages in order, without those that are empty then."""
    seen = set(left_out)
    kept = {}
    for name in sorted(pages):
        new = [text for text in dict.fromkeys(pages[name]) if text not in seen]
        seen.update(new)
        if new:
            kept[name] = "\n".join(new)
    return kept


def decode(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """Clean every page, split by page, and make tokens once."""
    encode = tokens.gpt2().encode_batch
    counts: dict[str, dict[str, int]] = {}
    with progress.bar("four languages", 2 * len(LANGUAGES), unit="steps") as advance:
        found: dict[str, dict[str, list[str]]] = {}
        for language in LANGUAGES:
            found[language] = _pages(folder, f"libreoffice-help-{language}_*.deb", language)
            found[language] |= _pages(folder, f"{_GUIDE}_*.deb", language)
            advance(1)
        each = [{text for page in pages.values() for text in page} for pages in found.values()]
        common = {text for text, languages in Counter(chain.from_iterable(each)).items() if languages > 1}
        for language in LANGUAGES:
            pages = _once(found[language], common)
            if not pages:
                raise DataError(f"the packages in {folder} hold no page in the language {language}")
            counts[language] = {"pages": len(pages), "characters": sum(map(len, pages.values()))}
            lines = [json.dumps({"page": name, "text": pages[name]}, ensure_ascii=False) for name in pages]
            out.text(f"{language}.jsonl", "\n".join(lines) + "\n")
            for part in SPLITS:
                names = [name for name in pages if side(name) == part]
                stream = tokens.stream([one.ids for one in encode([pages[name] for name in names])])
                out.array(f"{language}-{part}", stream)
                counts[language][part] = len(stream)
            advance(1)
    return {
        "languages": list(LANGUAGES),
        "counts": counts,
        "division": "ours, fixed: by page, 8 to 1 to 1 for training, validation and testing; the publishers give none",
    }


def read(folder: Path, facts: dict[str, Any], context: int = 512) -> Dataset:
    """Blocks of `context` tokens and the tokens that follow them; rows train, then validation, then test.

    `groups` is the language's number.
    """
    streams: dict[str, list[NDArray[Any]]] = {
        part: [store.array(folder, f"{language}-{part}") for language in facts["languages"]] for part in SPLITS
    }
    return tokens.corpus(folder.name, streams, tuple(facts["languages"]), context, facts)


SPEC = Spec(
    name="languages",
    title="Help texts in Catalan, Spanish, German and Dutch",
    licence="MPL-2.0 (LibreOffice help), GPL-2 (installation guide)",
    size=32_000_000,
    forms=(
        Form(
            PACKAGE,
            (
                *(
                    Raw(f"libreoffice-help-{one}_*.deb", package=Package("apt", f"libreoffice-help-{one}"))
                    for one in LANGUAGES
                ),
                Raw(f"{_GUIDE}_*.deb", package=Package("apt", _GUIDE)),
            ),
            decode,
        ),
    ),
    open=read,
    needs=("gpt2-tokenizer",),
    settings=("context",),
)
